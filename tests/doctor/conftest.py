"""One run whose trajectories a real engine samples and a real trainer reads, shared by all tests."""

import pytest

from beamline.models import tiny
from doctor_cases import Examined, examine, finished_run


@pytest.fixture(scope="session")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Examined:
    """Nothing is wrong with it. Norms, biases and head are random, so that softcap and routing matter."""
    folder = tmp_path_factory.mktemp("doctor")
    tiny.build(tiny.TINY_BEAM, folder / "model", seed=7, randomise=True)
    run = finished_run(folder / "model", folder / "healthy")
    ended = examine(run, "--problems", "6", "--samples", "4")
    assert ended.code == 0, ended.output
    return Examined(run, ended)
