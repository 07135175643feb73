"""A model directory that lacks something is refused before Megatron is imported."""

from pathlib import Path

import pytest

from beamline.models import tiny
from beamline.protocol.errors import ConfigError
from beamline.trainer.model_dir import check_model_dir


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_what_is_missing_is_named(tmp_path: Path, missing: str):
    tiny.build(tiny.TINY_BEAM, tmp_path, seed=0)
    check_model_dir(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(ConfigError, match=rf"model.path=.* has no .*{Path(missing).suffix}"):
        check_model_dir(tmp_path)
