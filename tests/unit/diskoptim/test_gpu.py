"""Parameters on a GPU: pinned buffers, a stream of its own, torch's fused kernel there."""

from pathlib import Path

import pytest
import torch

from beamline.diskoptim.disk_adamw import DiskAdamW

SHAPES = ((), (7,), (333, 77), (50_001,), (1000, 1000))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_updates_as_torch_does(dtype: torch.dtype, tmp_path: Path) -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape, generator=generator, device="cuda").to(dtype)) for shape in SHAPES]
    mains = [torch.nn.Parameter(p.detach().float()) for p in ours]
    disk = DiskAdamW(ours, tmp_path, lr=1e-2, max_grad_norm=1.0, bucket_bytes=2**20)
    fused = torch.optim.AdamW(mains, lr=1e-2, fused=True)
    for _ in range(20):
        for mine, main in zip(ours, mains, strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator, device="cuda").to(dtype)
            main.grad = mine.grad.float()
        norm = disk.step()
        assert norm == torch.nn.utils.clip_grad_norm_(mains, 1.0, foreach=False).item()
        fused.step()
    for index, (mine, main) in enumerate(zip(ours, mains, strict=True)):
        assert torch.equal(mine, main.to(dtype))
        assert torch.equal(disk.read(str(index)).exp_avg_sq, fused.state[main]["exp_avg_sq"].cpu())
    disk.close()
