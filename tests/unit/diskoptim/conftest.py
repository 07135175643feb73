"""What several files use. Tests of a GPU are run where there is one."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from beamline.diskoptim.disk_adamw import DiskAdamW

HAS_GPU = Path("/dev/nvidiactl").exists()
SMALL_BUCKET = 64 * 1024


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` on a machine without."""
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU and its driver"))


@pytest.fixture
def model() -> dict[str, torch.nn.Parameter]:
    """20,503 parameters with gradients: five buckets of the smallest size, one parameter in four of them."""
    generator = torch.Generator().manual_seed(5)
    shapes = {"scale": (), "bias": (7,), "weight": (129, 128), "head": (62, 64), "last": (15,)}
    made = {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}
    for parameter in made.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return made


@pytest.fixture
def make(model: dict[str, torch.nn.Parameter], tmp_path: Path) -> Iterator[Callable[..., DiskAdamW]]:
    """Makes an optimizer of the model, in a directory of the test's; `close` at the end."""
    made: list[DiskAdamW] = []

    def optimizer(directory: Path = tmp_path / "optimizer", **settings: object) -> DiskAdamW:
        made.append(DiskAdamW(model.items(), directory, **{"bucket_bytes": SMALL_BUCKET, "lr": 1e-2, **settings}))
        return made[-1]

    yield optimizer
    for each in made:
        each.close()
