"""The head's log-probabilities, entropies and their gradients, against torch's autograd on the whole matrix."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from beamline.trainer.megatron import head as heads
from beamline.trainer.megatron.head import Head, logprobs_and_entropy
from trainer_head_cases import CASES, NUM_ENTRIES, Tensors, inputs
from trainer_tensors_made import LargestTensor

SUPPORT = Path(__file__).parents[1] / "support"
NUM_ROWS = 37
ABSOLUTE = 1e-6
DEADLINE_S = 120


def plain(given: Tensors, head: Head) -> tuple[Tensor, Tensor]:
    """As one writes it with torch, in the precision of what is given."""
    logits = functional.linear(given["hidden"], given["weight"])
    if head.softcap is not None:
        logits = torch.tanh(logits / head.softcap) * head.softcap
    logprobs = functional.log_softmax(logits / head.temperature, dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, given["targets"].unsqueeze(-1)).squeeze(-1), entropy


def results(given: Tensors, outputs: tuple[Tensor, Tensor]) -> Tensors:
    """Values and gradients, the outputs weighted as `given` says."""
    names = ("logprobs", "entropy")
    total = sum((outputs[n] * given[f"grad.{name}"]).sum() for n, name in enumerate(names) if outputs[n].requires_grad)
    assert isinstance(total, Tensor)
    leaves = [name for name in ("hidden", "weight") if given[name].requires_grad]
    gradients = torch.autograd.grad(total, [given[name] for name in leaves])
    return dict(zip(names, (o.detach() for o in outputs), strict=True)) | dict(zip(leaves, gradients, strict=True))


def fused(given: Tensors, head: Head) -> Tensors:
    return results(given, logprobs_and_entropy(given["hidden"], given["weight"], given["targets"], head))


def gap(found: Tensors, expected: Tensors) -> dict[str, float]:
    """Largest difference, of gradients as a share of the largest one where that is over 1."""
    assert found.keys() == expected.keys()
    sizes = {name: float(e.abs().max().clamp(min=1)) if e.numel() else 1.0 for name, e in expected.items()}
    differences = {name: (found[name].double() - e.double()).abs() for name, e in expected.items()}
    return {name: float(d.max()) / sizes[name] if d.numel() else 0.0 for name, d in differences.items()}


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ten rows by seven entries, so that neither divides what there is."""
    monkeypatch.setattr(heads, "CHUNK_ROWS", 10)
    monkeypatch.setattr(heads, "TILE_BYTES", 10 * 7 * 4)
    return


@pytest.mark.parametrize("num_rows", [1, 10, NUM_ROWS])
@pytest.mark.parametrize("head", CASES.values(), ids=CASES.keys())
def test_values_and_gradients_are_those_of_the_whole_matrix(small_tiles: None, head: Head, num_rows: int):
    given = inputs(num_rows)
    assert max(gap(fused(given, head), results(given, plain(given, head))).values()) <= ABSOLUTE


@pytest.mark.parametrize("head", CASES.values(), ids=CASES.keys())
def test_the_usual_tiles_hold_small_shapes_whole(head: Head):
    given = inputs(NUM_ROWS)
    assert max(gap(fused(given, head), results(given, plain(given, head))).values()) <= ABSOLUTE


def test_tiles_lose_no_precision(small_tiles: None):
    """Against float64 they are at least as near as one float32 matrix, on rows of large and of small scores."""
    given, head = inputs(NUM_ROWS, scale=12.0), CASES["softcap, T 0.7"]
    exact = {name: value.detach().double() if value.is_floating_point() else value for name, value in given.items()}
    for name in ("hidden", "weight"):
        exact[name].requires_grad_()
    expected = results(exact, plain(exact, head))
    ours, theirs = gap(fused(given, head), expected), gap(results(given, plain(given, head)), expected)
    for name, difference in ours.items():
        assert difference <= 1.5 * theirs[name] + 1e-7, name


def test_no_rows_have_no_gradient(small_tiles: None):
    given = inputs(0)
    found = fused(given, CASES["softcap, T 0.7"])
    assert (found["logprobs"].shape, found["entropy"].shape, found["hidden"].shape) == ((0,), (0,), (0, 16))
    assert torch.equal(found["weight"], torch.zeros_like(given["weight"]))


def test_entropy_has_no_gradient_unless_it_is_asked_for(small_tiles: None):
    given, head = inputs(NUM_ROWS), CASES["softcap, T 0.7"]
    silent = replace(head, entropy_gradient=False)
    logprobs, entropy = logprobs_and_entropy(given["hidden"], given["weight"], given["targets"], silent)
    assert logprobs.requires_grad and not entropy.requires_grad
    expected = results(given, (plain(given, head)[0], entropy))
    assert max(gap(results(given, (logprobs, entropy)), expected).values()) <= ABSOLUTE


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_frozen_has_no_gradient(small_tiles: None, frozen: str):
    given = inputs(NUM_ROWS)
    given[frozen].requires_grad_(False)
    head = CASES["softcap, T 0.7"]
    found = fused(given, head)
    assert frozen not in found
    assert max(gap(found, results(given, plain(given, head))).values()) <= ABSOLUTE


def test_the_gradient_of_a_certain_token_and_of_an_even_distribution_is_zero():
    """Entropy is largest where all scores are equal, and flat where one token has all the probability."""
    head = Head(1.0, entropy_gradient=True)
    hidden = torch.tensor([[0.0, 0.0], [300.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    _, entropy = logprobs_and_entropy(hidden, weight, torch.tensor([0, 0]), head)
    assert entropy.tolist() == pytest.approx([torch.log(torch.tensor(3.0)).item(), 0.0], abs=1e-6)
    (gradient,) = torch.autograd.grad(entropy.sum(), hidden)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-7)


def test_in_bfloat16_only_the_inputs_and_the_gradients_are_rounded(small_tiles: None):
    head = CASES["softcap, T 0.7"]
    exact, given = inputs(NUM_ROWS), inputs(NUM_ROWS)
    for name in ("hidden", "weight"):
        given[name] = given[name].detach().bfloat16().requires_grad_()
        exact[name] = given[name].detach().float().requires_grad_()
    found, expected = fused(given, head), results(exact, plain(exact, head))
    kinds = {name: tensor.dtype for name, tensor in found.items()}
    half, full = torch.bfloat16, torch.float32
    assert kinds == {"logprobs": full, "entropy": full, "hidden": half, "weight": half}
    for name in ("logprobs", "entropy"):
        assert gap({name: found[name]}, {name: expected[name]})[name] <= ABSOLUTE
    for name in ("hidden", "weight"):
        torch.testing.assert_close(found[name].float(), expected[name], rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_never_more_than_three_tiles(small_tiles: None, entropy_gradient: bool):
    given = inputs(NUM_ROWS)
    with LargestTensor() as made:
        fused(given, replace(CASES["softcap, T 0.7"], entropy_gradient=entropy_gradient))
    rest = max(given["hidden"].numel(), given["weight"].numel())
    assert made.num_elements <= max(3 * 10 * 7, rest) < NUM_ROWS * NUM_ENTRIES


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Tensors]:
    """What each of two processes found with half of the vocabulary; by `<case>.<result>`."""
    directory = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(SUPPORT / "trainer_head_rank.py"), str(directory), str(NUM_ROWS), str(port)]
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    processes = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(2)]
    try:
        codes = [process.wait(timeout=DEADLINE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0]
    return [load_file(directory / f"{rank}.safetensors") for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_with_half_of_the_vocabulary_each_find_the_same(two_ranks: list[Tensors], name: str):
    """Targets stand at both ends of both halves; a hidden state's gradient is the sum of the ranks' parts."""
    one, other = ({part.removeprefix(f"{name}."): t for part, t in found.items()} for found in two_ranks)
    for part in ("logprobs", "entropy"):
        assert torch.equal(one[part], other[part])
    given = inputs(NUM_ROWS)
    expected = results(given, plain(given, CASES[name]))
    found = {part: one[part] for part in ("logprobs", "entropy")}
    found |= {"hidden": one["hidden"] + other["hidden"], "weight": torch.cat((one["weight"], other["weight"]))}
    assert max(gap(found, expected).values()) <= ABSOLUTE
