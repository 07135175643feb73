from pathlib import Path

import pytest
from launcher_fakes import trial_config

from beamline.protocol.config import RunConfig


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return trial_config(tmp_path)
