"""Bit for bit torch's fused AdamW, wherever a parameter is cut."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from beamline.diskoptim.disk_adamw import DiskAdamW
from beamline.diskoptim.gradients import total_norm

SHAPES = ((), (1,), (7,), (3, 5), (16, 16), (1000,), (333, 77), (50_001,), (123, 457), (15,))
NUM_STEPS = 20


def parameters(dtype: torch.dtype = torch.float32, seed: int = 3) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def groups(params: Sequence[torch.nn.Parameter]) -> list[dict[str, object]]:
    return [
        {"params": list(params[:4]), "weight_decay": 0.0, "lr": 3e-3},
        {"params": list(params[4:]), "weight_decay": 0.1, "betas": (0.8, 0.95)},
    ]


def random_gradients(params: Sequence[torch.nn.Parameter], step: int) -> list[torch.Tensor]:
    """Small in one step and large in the next."""
    generator = torch.Generator().manual_seed(100 + step)
    size = 30.0 if step % 2 else 1e-3
    return [(torch.randn(p.shape, generator=generator) * size).to(p.dtype) for p in params]


def assert_equal_state(disk: DiskAdamW, fused: torch.optim.Optimizer, mains: Sequence[torch.Tensor]) -> None:
    for index, main in enumerate(mains):
        state = disk.read(str(index))
        assert torch.equal(state.main, main), index
        assert torch.equal(state.exp_avg, fused.state[main]["exp_avg"]), index
        assert torch.equal(state.exp_avg_sq, fused.state[main]["exp_avg_sq"]), index


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_twenty_steps_over_random_cuts(seed: int, max_grad_norm: float | None, tmp_path: Path) -> None:
    """Odd sizes, sizes over several buckets, groups with their own decay, clipping; opened anew in the middle."""
    ours, theirs = parameters(), parameters()
    bucket_bytes = random.Random(seed).randint(64 * 1024, 500_000)
    settings = {"lr": 1e-2, "max_grad_norm": max_grad_norm, "bucket_bytes": bucket_bytes}
    disk = DiskAdamW(groups(ours), tmp_path, **settings)
    fused = torch.optim.AdamW(groups(theirs), lr=1e-2, fused=True)
    for step in range(NUM_STEPS):
        if step == NUM_STEPS // 2:
            disk.close()
            disk = DiskAdamW(groups(ours), tmp_path, **settings)
        for mine, other, gradient in zip(ours, theirs, random_gradients(ours, step), strict=True):
            mine.grad, other.grad = gradient, gradient.clone()
        norm = disk.step()
        if max_grad_norm is not None:
            assert norm == torch.nn.utils.clip_grad_norm_(theirs, max_grad_norm).item()
        fused.step()
    assert disk.num_steps == NUM_STEPS
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
    assert_equal_state(disk, fused, theirs)
    disk.close()


def test_bfloat16_parameters_have_float32_main_weights(tmp_path: Path) -> None:
    """The reference is float32 AdamW on copies, rounded; gradients are clipped in float32, and scaled before."""
    ours = parameters(torch.bfloat16)
    mains = [torch.nn.Parameter(p.detach().float()) for p in ours]
    disk = DiskAdamW(groups(ours), tmp_path, lr=1e-2, max_grad_norm=1.0, bucket_bytes=100_000)
    fused = torch.optim.AdamW(groups(mains), lr=1e-2, fused=True)
    for step in range(NUM_STEPS):
        for mine, main, gradient in zip(ours, mains, random_gradients(ours, step), strict=True):
            mine.grad, main.grad = gradient, gradient.float() * 0.25
        norm = disk.step(lr=1e-2 / (step + 1), grad_scale=0.25)
        assert norm == torch.nn.utils.clip_grad_norm_(mains, 1.0).item()
        for group in fused.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        fused.step()
    assert all(torch.equal(mine, main.bfloat16()) for mine, main in zip(ours, mains, strict=True))
    assert_equal_state(disk, fused, mains)
    disk.close()


def test_gradients_may_be_given_and_stay_as_they_are(tmp_path: Path) -> None:
    """As a caller that accumulates in float32 beside bfloat16 weights does; any factor before the update."""
    ours = parameters(torch.bfloat16)
    mains = [torch.nn.Parameter(p.detach().float()) for p in ours]
    disk = DiskAdamW(ours, tmp_path, lr=1e-2, bucket_bytes=100_000)
    fused = torch.optim.AdamW(mains, lr=1e-2, fused=True)
    given = random_gradients(mains, 1)
    for main, gradient in zip(mains, given, strict=True):
        main.grad = gradient * 0.3
    kept = [gradient.clone() for gradient in given]
    assert disk.step(grads={str(i): gradient for i, gradient in enumerate(given)}, grad_scale=0.3) is None
    fused.step()
    assert_equal_state(disk, fused, mains)
    assert all(torch.equal(gradient, before) for gradient, before in zip(given, kept, strict=True))
    disk.close()


def test_the_norm_of_large_bfloat16_gradients_is_taken_in_float32() -> None:
    """By pieces: nearer to the truth than torch's sum over the whole, which is off by 2e-5, and far from bfloat16's."""
    gradient = torch.randn(600_001, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert total_norm({"weight": gradient}).item() == pytest.approx(gradient.double().norm().item(), rel=1e-5)


def test_threads_change_nothing(tmp_path: Path) -> None:
    found = []
    for num_threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        ours = parameters()
        disk = DiskAdamW(ours, tmp_path / str(num_threads), lr=1e-2, max_grad_norm=1.0, bucket_bytes=200_000)
        for mine, gradient in zip(ours, random_gradients(ours, 1), strict=True):
            mine.grad = gradient
        disk.step()
        found.append([disk.read(str(i)) for i in range(len(ours))])
        disk.close()
        torch.set_num_threads(before)
    assert all(torch.equal(one.main, two.main) for one, two in zip(*found, strict=True))
