"""What is read of a model directory, and how its gaps are named."""

import json
import re
from pathlib import Path

import pytest

from beamline.models import tiny
from beamline.protocol.errors import ConfigError
from beamline.rollout import checkpoint


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    tiny.build(tiny.TINY_BEAM, tmp_path, seed=0)
    return tmp_path


def test_every_tensor_is_known_by_name_and_shape(copy: Path):
    assert checkpoint.tensor_shapes(copy) == dict(tiny.TINY_BEAM.shapes())


def test_end_tokens_may_be_one_or_several(copy: Path):
    for given, expected in ((7, [7]), ([7, 9], [7, 9])):
        (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
        assert checkpoint.end_tokens(copy) == expected
    (copy / "generation_config.json").unlink()
    assert checkpoint.end_tokens(copy) == [checkpoint.read_config(copy)["eos_token_id"]]


@pytest.mark.parametrize(
    ("missing", "read"),
    [
        ("tokenizer.json", checkpoint.tokenizer_file),
        ("config.json", checkpoint.read_config),
        ("model.safetensors", checkpoint.tensor_shapes),
    ],
)
def test_a_missing_file_is_named_with_its_directory(copy: Path, missing: str, read):
    (copy / missing).unlink()
    with pytest.raises(ConfigError, match=re.escape(str(copy))) as error:
        read(copy)
    assert missing.rpartition(".")[2] in str(error.value)


def test_a_model_without_an_end_token_is_refused(copy: Path):
    for name in ("generation_config.json", "config.json"):
        config = json.loads((copy / name).read_text())
        config["eos_token_id"] = None
        (copy / name).write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="eos_token_id"):
        checkpoint.end_tokens(copy)


def test_a_model_shorter_than_the_configured_lengths_is_refused(copy: Path):
    checkpoint.check_servable(copy, tiny.TINY_BEAM.max_position_embeddings)
    with pytest.raises(ConfigError, match=r"8193 exceeds .* 8192"):
        checkpoint.check_servable(copy, tiny.TINY_BEAM.max_position_embeddings + 1)
