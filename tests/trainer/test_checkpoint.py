"""Checkpoints: whole or refused, the newest named by `latest`, exported as a Hugging Face directory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from beamline.models import tiny
from beamline.protocol.errors import WeightError
from beamline.runtime import checkpoints
from beamline.runtime.checkpoints import TrainerState
from beamline.runtime.model_identity import ModelIdentity
from beamline.trainer import checkpoint
from beamline.trainer.fake_policy import FakePolicy
from beamline.trainer.weights_out import write_safetensors


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    tiny.build(tiny.TINY_BEAM, tmp_path / "model", seed=0, dtype="bfloat16")
    return tmp_path / "model"


def state_of(step: int, model_dir: Path) -> TrainerState:
    return TrainerState(
        step=step,
        dtype="float32",
        model=ModelIdentity.of(model_dir),
        layout={"tensor": 1},
        optimizer={"state": "device"},
    )


@pytest.fixture
def root(tmp_path: Path, model_dir: Path) -> Path:
    for step in (1, 2):
        checkpoint.save(tmp_path / "ckpt", model_dir, state_of(step, model_dir), FakePolicy(5, seed=step).save)
    return tmp_path / "ckpt"


def test_a_saved_checkpoint_is_whole_and_the_newest_is_latest(root: Path, model_dir: Path):
    assert checkpoints.damage(root / "global_step_2") == ""
    assert checkpoints.resolve(root) == checkpoints.resolve(root / "latest") == (root / "global_step_2").resolve()
    assert [path.name for path in root.iterdir() if path.name.startswith(".")] == []
    policy = root / "global_step_2" / "policy"
    assert json.loads((policy / "config.json").read_text())["dtype"] == "float32"
    assert (policy / "tokenizer.json").read_bytes() == (model_dir / "tokenizer.json").read_bytes()
    loaded = FakePolicy(5)
    loaded.load(root / "global_step_2")
    assert torch.equal(loaded.table_VV, FakePolicy(5, seed=2).table_VV)


def test_a_step_that_is_saved_again_takes_the_place_of_the_first(root: Path, model_dir: Path):
    checkpoint.save(root, model_dir, state_of(2, model_dir), FakePolicy(5, seed=99).save)
    assert checkpoints.damage(root / "global_step_2") == ""
    loaded = FakePolicy(5)
    loaded.load(root / "global_step_2")
    assert torch.equal(loaded.table_VV, FakePolicy(5, seed=99).table_VV)
    assert sorted(path.name for path in root.iterdir()) == ["global_step_1", "global_step_2", "latest"]


@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "add", "manifest"])
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_it_offered(root: Path, harm: str):
    folder = root / "global_step_2"
    weights = folder / "policy" / "model.safetensors"
    content = weights.read_bytes()
    match harm:
        case "flip":
            weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "cut":
            weights.write_bytes(content[:-8])
        case "remove":
            (folder / "policy" / "tokenizer.json").unlink()
        case "add":
            (folder / "policy" / "more.safetensors").write_bytes(b"x")
        case "manifest":
            (folder / "manifest.json").unlink()
    with pytest.raises(WeightError, match=r"global_step_2 cannot be used: .*use .*global_step_1"):
        checkpoints.resolve(root)


def test_a_damaged_checkpoint_is_written_anew(root: Path, model_dir: Path):
    (root / "global_step_2" / "policy" / "model.safetensors").write_bytes(b"")
    checkpoint.save(root, model_dir, state_of(2, model_dir), FakePolicy(5, seed=2).save)
    assert checkpoints.damage(root / "global_step_2") == ""


def export(*arguments: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "beamline.trainer.export", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_export_is_a_command_that_copies_the_policy(root: Path, tmp_path: Path):
    done = export(root / "latest", tmp_path / "hf")
    assert done.returncode == 0, done.stderr
    names = {path.name for path in (tmp_path / "hf").iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    } <= names
    again = export(root, tmp_path / "hf")
    assert again.returncode == 2
    assert again.stderr.startswith("error:")
    assert "is not empty: export into a new directory" in again.stderr


def test_large_policies_are_written_in_shards_with_an_index(tmp_path: Path):
    tensors = {f"layer.{i}.weight": torch.full((10, 10), float(i)) for i in range(5)}
    write_safetensors(tensors.items(), tmp_path, shard_bytes=1000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)
    assert len(set(index["weight_map"].values())) == 3
    for name, tensor in tensors.items():
        assert torch.equal(load_file(tmp_path / index["weight_map"][name])[name], tensor)
