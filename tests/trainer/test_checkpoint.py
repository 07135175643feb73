"""Checkpoints as the trainer writes them: whole or refused, described, on disk before they have a name."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from beamline.diskoptim.errors import StateError
from beamline.diskoptim.state_file import AdamState, StateFile, write_state
from beamline.models import tiny
from beamline.protocol.errors import WeightError
from beamline.runtime import checkpoints
from beamline.runtime.checkpoint_manifest import read_manifest
from beamline.runtime.checkpoints import TrainerState
from beamline.runtime.model_description import describe
from beamline.runtime.model_identity import ModelIdentity
from beamline.trainer import checkpoint
from beamline.trainer.fake_policy import FakePolicy
from beamline.trainer.weights_out import DISK_ERRORS, write_safetensors
from saved_checkpoint import save


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
        save(tmp_path / "ckpt", model_dir, state_of(step, model_dir), FakePolicy(5, seed=step).save)
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
    save(root, model_dir, state_of(2, model_dir), FakePolicy(5, seed=99).save)
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
    save(root, model_dir, state_of(2, model_dir), FakePolicy(5, seed=2).save)
    assert checkpoints.damage(root / "global_step_2") == ""


def test_a_policy_says_how_to_generate_though_its_model_does_not(model_dir: Path, tmp_path: Path):
    (model_dir / "generation_config.json").unlink()
    config = json.loads((model_dir / "config.json").read_text())
    ids = {f"{name}_token_id": config.pop(f"{name}_token_id", None) for name in ("eos", "pad", "bos")}
    (model_dir / "config.json").write_text(json.dumps(config))
    (tmp_path / "policy").mkdir()
    describe(model_dir, tmp_path / "policy", "float32")
    found = json.loads((tmp_path / "policy" / "generation_config.json").read_text())
    assert found["eos_token_id"] == ids["eos_token_id"] and found["pad_token_id"] is not None, (
        "as the tokenizer has them"
    )


def test_what_a_model_says_of_generation_is_kept(model_dir: Path, tmp_path: Path):
    said = {"eos_token_id": [5, 6], "temperature": 0.7}
    (model_dir / "generation_config.json").write_text(json.dumps(said))
    (tmp_path / "policy").mkdir()
    describe(model_dir, tmp_path / "policy", "float32")
    found = json.loads((tmp_path / "policy" / "generation_config.json").read_text())
    assert found | said == found and isinstance(found["pad_token_id"], int)


def test_an_optimizers_state_is_covered_by_its_buckets_and_not_read_to_seal_it(model_dir: Path, tmp_path: Path):
    """In the format of all optimizers, whose checksums are compared without torch."""
    states = [(f"layer.{i}", AdamState(*(torch.full((300, 70), float(i + j)) for j in range(3)))) for i in range(4)]
    draft = checkpoint.begin(tmp_path / "ckpt", 7)
    describe(model_dir, draft / "policy", "float32")
    write_state(draft / "optimizer", "rank-00000", states, num_steps=7, bucket_bytes=400_000)
    num_read: list[int] = []
    folder = checkpoint.seal(draft, state_of(7, model_dir), num_read.append)
    state = folder / "optimizer" / "rank-00000.state"
    entries = {entry.path: entry for entry in read_manifest(folder).files}
    covered = entries["optimizer/rank-00000.state"]
    assert (covered.buckets_in, covered.xxh3_128) == ("optimizer/rank-00000.json", "")
    assert sum(num_read) == sum(entry.num_bytes for entry in entries.values()) - state.stat().st_size
    assert checkpoints.damage(folder) == ""
    with state.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    assert checkpoints.damage(folder).startswith("damaged: bucket ")
    with pytest.raises(StateError, match="is damaged: bucket"):
        StateFile.open(folder / "optimizer", "rank-00000").verify()


def test_a_checkpoint_is_on_disk_before_it_has_its_name(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Files, then folders, then the manifest, then the name."""
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    folder = save(tmp_path / "ckpt", model_dir, state_of(1, model_dir), FakePolicy(5).save)
    written = {path.name for path in folder.rglob("*")} - {"manifest.json"}
    before, after = synced[: synced.index("manifest.json")], synced[synced.index("manifest.json") :]
    assert set(before) == {*written, ".global_step_1.draft"}
    assert after == ["manifest.json", ".global_step_1.draft", "ckpt", "ckpt"]


def test_a_failing_disk_keeps_nobody_waiting(tmp_path: Path):
    """Other ranks may take part in making the tensors that are left."""
    made: list[int] = []

    def tensors():
        for i in range(5):
            made.append(i)
            yield f"layer.{i}", torch.zeros(10, 10)

    with pytest.raises(DISK_ERRORS):
        write_safetensors(tensors(), tmp_path / "gone", shard_bytes=500)
    assert made == list(range(5))


def test_large_policies_are_written_in_shards_with_an_index(tmp_path: Path):
    tensors = {f"layer.{i}.weight": torch.full((10, 10), float(i)) for i in range(5)}
    write_safetensors(tensors.items(), tmp_path, shard_bytes=1000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)
    assert len(set(index["weight_map"].values())) == 3
    for name, tensor in tensors.items():
        assert torch.equal(load_file(tmp_path / index["weight_map"][name])[name], tensor)
