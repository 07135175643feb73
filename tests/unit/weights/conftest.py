"""What several files use. Tests of a GPU's memory are run where there is one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from beamline.weights.staging import Stage

HAS_GPU = Path("/dev/nvidiactl").exists()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` on a machine without."""
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU and its driver"))


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()
