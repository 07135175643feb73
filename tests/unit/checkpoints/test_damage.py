"""What is wrong with a checkpoint is found and told by kind, and another one is offered."""

import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from beamline.protocol.errors import WeightError
from beamline.runtime.checkpoint_manifest import MANIFEST, Unusable, decode_manifest
from beamline.runtime.checkpoints import checkpoints_of, damage, resolve
from beamline.runtime.verification import Verification
from made_checkpoints import BUCKET_BYTES, CONFIG, STATE, make_checkpoint

FILES = (
    "policy/config.json", "policy/model.safetensors", "policy/tokenizer.json", STATE, "optimizer/rank-00000.json",
    "optimizer/rank-00000.slots.json", "rng/rank-00000.safetensors", "trainer_state.json", "data_cursor.json",
    "ledger.json",
)  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        make_checkpoint(tmp_path / "checkpoints", step)
    return tmp_path / "checkpoints"


def flip(path: Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_every_kind_of_file_is_covered(root: Path):
    folder = root / "global_step_3"
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert found == {*FILES, MANIFEST} and damage(folder) == ""


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_is_found_in_every_kind_of_file(root: Path, name: str):
    folder = root / "global_step_3"
    flip(folder / name)
    assert damage(folder).startswith("damaged: ") and Path(name).name in damage(folder)
    assert damage(folder, deep=False) == "", "sizes and names alone do not tell"
    with pytest.raises(WeightError) as error:
        resolve(root)
    assert f"checkpoint {folder} cannot be used: damaged: " in str(error.value)
    assert f"use {root / 'global_step_2'}, the newest that is whole" in str(error.value)


@pytest.mark.parametrize("bucket", [0, 1, 2])
def test_a_damaged_bucket_is_named(root: Path, bucket: int):
    flip(root / "global_step_3" / STATE, bucket * BUCKET_BYTES)
    expected = f"damaged: bucket {bucket} of rank-00000.state (at {bucket * BUCKET_BYTES}) is not what rank-00000.json"
    assert damage(root / "global_step_3").startswith(expected)


def test_a_flipped_byte_of_the_manifest_is_found_wherever_it_is(root: Path):
    folder = root / "global_step_3"
    whole = (folder / MANIFEST).read_bytes()
    unnoticed = []
    for at in range(len(whole)):
        with suppress(Unusable):
            decode_manifest(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            unnoticed.append(at)
    assert unnoticed == []
    flip(folder / MANIFEST, len(whole) // 2)
    assert damage(folder).startswith("damaged: its manifest.json ")


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_found_without_reading_any(root: Path, name: str):
    path = root / "global_step_3" / name
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    assert damage(root / "global_step_3", deep=False) == (
        f"truncated: {name} has {size - 1} bytes, its manifest.json says {size}"
    )


def test_missing_and_unlisted_files_are_named(root: Path):
    folder = root / "global_step_3"
    (folder / "ledger.json").unlink()
    assert damage(folder) == "incomplete: ledger.json is missing"
    (folder / "data_cursor.json").unlink()
    shutil.rmtree(folder / "rng")
    assert damage(folder) == "incomplete: data_cursor.json, ledger.json and 1 more are missing"
    (root / "global_step_2" / "policy" / "more.safetensors").write_bytes(b"x")
    assert damage(root / "global_step_2") == "changed: policy/more.safetensors is not in its manifest.json"


def test_incomplete_missing_and_foreign_ones_are_told_apart(root: Path):
    (root / "global_step_3" / MANIFEST).unlink()
    assert damage(root / "global_step_3") == "incomplete: it has no manifest.json, which is written last"
    assert damage(root / "global_step_9") == "missing: it does not exist"
    path = root / "global_step_2" / MANIFEST
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({"step": 2, "files": manifest["files"]}))
    assert damage(root / "global_step_2").startswith("foreign: its manifest.json is of no format that it names, not of")
    path.write_text(json.dumps(manifest | {"version": 2}))
    assert "'beamline-checkpoint' version 2, not of 'beamline-checkpoint' version 1" in damage(root / "global_step_2")
    path.write_text(json.dumps(manifest | {"step": 5}))
    assert damage(root / "global_step_2") == "damaged: its manifest.json is not what was written"
    (root / "global_step_1").rename(root / "global_step_7")
    assert damage(root / "global_step_7") == "foreign: its manifest is of step 1"


def test_a_checkpoint_of_another_model_is_foreign(root: Path, tmp_path: Path):
    (tmp_path / "same").mkdir()
    (tmp_path / "same" / "config.json").write_text(json.dumps(CONFIG | {"dtype": "bfloat16", "_name_or_path": "x"}))
    assert damage(root / "global_step_3", model=tmp_path / "same") == ""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 128}))
    expected = f"foreign: it is of another BeamForCausalLM than {tmp_path / 'other'} (hidden_size is 64, not 128)"
    assert damage(root / "global_step_3", model=tmp_path / "other") == expected
    with pytest.raises(WeightError, match=r"global_step_3 cannot be used: foreign: .*; there is no other that is"):
        resolve(root, model=tmp_path / "other")


def test_resolve_takes_one_or_the_newest_of_all(root: Path, tmp_path: Path):
    assert resolve(root / "global_step_1") == root / "global_step_1"
    assert resolve(root) == resolve(root / "latest") == root / "global_step_3"
    (root / "latest").unlink()
    assert resolve(root) == root / "global_step_3", "a crash may have come before the link"
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightError, match="empty has no checkpoint"):
        resolve(tmp_path / "empty")
    with pytest.raises(WeightError, match=r"global_step_9 cannot be used: missing: .*; use .*global_step_3"):
        resolve(root / "global_step_9")


def test_the_newest_is_the_one_that_was_made_last(root: Path):
    """A run that went on from step 1 makes step 2 anew; the older step 3 is of a past that is over."""
    make_checkpoint(root, 2)
    assert resolve(root) == root / "global_step_2"
    assert [facts.step for facts in checkpoints_of(root)] == [2, 3, 1]


def test_facts_of_each_checkpoint(root: Path):
    (root / "global_step_1" / "policy" / "tokenizer.json").unlink()
    (root / ".global_step_4.draft" / "policy").mkdir(parents=True)
    third, _, first, draft = checkpoints_of(root)
    assert (third.step, third.is_latest, third.wrong, third.holds) == (3, True, "", "policy")
    assert (third.layout["tensor"], third.optimizer_state, third.verified) == (2, "disk", None)
    size = sum(path.stat().st_size for path in (root / "global_step_3").rglob("*") if path.is_file())
    assert third.num_bytes == size - (root / "global_step_3" / MANIFEST).stat().st_size
    assert (first.is_latest, first.wrong) == (False, "incomplete: policy/tokenizer.json is missing")
    assert (draft.step, draft.wrong) == (4, "incomplete: it is being written or removed, or was left by a crash")


def test_a_verification_is_remembered_until_the_manifest_changes(root: Path):
    folder = root / "global_step_3"
    Verification.remember(folder, "damaged: x")
    facts = checkpoints_of(root)[0]
    assert facts.verified and facts.found_damage == "damaged: x"
    assert (damage(folder), facts.wrong) == ("", ""), "it is no part of the checkpoint"
    (folder / MANIFEST).write_bytes((folder / MANIFEST).read_bytes() + b" ")
    assert checkpoints_of(root)[0].verified is None
