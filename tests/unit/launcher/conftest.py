from pathlib import Path

import pytest

from beamline.protocol.config import RunConfig
from launcher_fakes import trial_config


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return trial_config(tmp_path)
