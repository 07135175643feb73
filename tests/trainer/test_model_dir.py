"""A model directory that lacks something is refused before Megatron is imported."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from beamline.models import tiny
from beamline.models.weight_files import num_elements
from beamline.protocol.errors import ConfigError
from beamline.trainer.model_dir import check_model_dir


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_what_is_missing_is_named(tmp_path: Path, missing: str):
    tiny.build(tiny.TINY_BEAM, tmp_path, seed=0)
    check_model_dir(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(ConfigError, match=rf"model.path=.* has no .*{Path(missing).suffix}"):
        check_model_dir(tmp_path)


def test_elements_are_counted_in_all_files(tmp_path: Path):
    tiny.build(tiny.TINY_BEAM, tmp_path, seed=0)
    whole = num_elements(tmp_path)
    assert whole == sum(tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values())
    save_file({"more": torch.zeros(2, 3)}, tmp_path / "more.safetensors")
    assert num_elements(tmp_path) == whole + 6
