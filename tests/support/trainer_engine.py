"""Fixtures for tests of the trainer's real engine on one rank: a test file names this module in `pytest_plugins`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from beamline.models import tiny
from beamline.trainer.megatron import distributed
from beamline.trainer.megatron.distributed import Layout, Ranks


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """Megatron's process groups, of this process alone."""
    torch.set_num_threads(1)
    distributed.start(Ranks(), Layout())
    yield
    distributed.stop()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny Beam with randomised weights."""
    directory = tmp_path_factory.mktemp("model")
    tiny.build(tiny.TINY_BEAM, directory, seed=3, randomise=True)
    return directory
