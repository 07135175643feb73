"""How the trainer answers save requests, on a table policy: copied, completed behind, never twice, never half."""

import asyncio
import json
import os
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from beamline.protocol import messages as m
from beamline.runtime import checkpoints
from beamline.runtime.checkpoint_manifest import read_manifest
from beamline.trainer import checkpoint
from beamline.trainer.fake_policy import FakePolicy
from full_disk import can_mount, on_small_disk
from trainer_bench import VOCAB, Bench, lease

FILES = {"data_cursor.json": b'{"position": 3}', "ledger.json": b"{}"}
BLOCKED_S = 10.0
TABLE = "model.safetensors"


@pytest.fixture
async def bench(tmp_path: Path):
    with ThreadPoolExecutor(1) as thread:
        bench = Bench(tmp_path, thread)
        await bench.worker.saver.start()
        await bench.worker.publish_first()
        yield bench
        await bench.worker.saver.finish()
        bench.rank.close()


type Gates = tuple[threading.Event, threading.Event]


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> Gates:
    """Set when a manifest is about to be written; and to be set, so that it is."""
    writing, may_go_on, real = threading.Event(), threading.Event(), checkpoint.manifest_of

    def slow_manifest(*args: object, **kwargs: object) -> bytes:
        writing.set()
        assert may_go_on.wait(BLOCKED_S)
        return real(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "manifest_of", slow_manifest)
    return writing, may_go_on


def table_of(policy: Path) -> torch.Tensor:
    loaded = FakePolicy(VOCAB)
    loaded.load(policy.parent)
    return loaded.table_VV.detach()


async def test_a_request_becomes_a_whole_checkpoint_with_the_coordinators_files(bench: Bench):
    await bench.train(1)
    copied = await bench.ask(1, files=FILES)
    assert (copied.step, copied.copy_s > 0) == (1, True)
    saved = await bench.saved()
    folder = bench.root / "global_step_1"
    assert (saved.step, saved.path, saved.export_path, saved.error) == (1, str(folder), "", "")
    assert checkpoints.damage(folder) == ""
    assert (
        saved.num_bytes
        == read_manifest(folder).num_bytes
        == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json")
    )
    assert saved.save_s >= copied.copy_s
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    state = json.loads((folder / "trainer_state.json").read_text())
    assert (state["step"], state["dtype"], state["layout"]["tensor"], state["optimizer"]) == (
        1, "float32", 1, {"state": "device"},
    )  # fmt: skip
    assert state["model"]["architecture"] == "BeamForCausalLM" and "torch" in state["versions"]
    assert torch.equal(table_of(folder / "policy"), bench.policy.table_VV.detach())


async def test_a_request_that_comes_again_is_answered_again_and_not_saved_twice(bench: Bench):
    await bench.train(1)
    first = await bench.ask(1)
    saved = await bench.saved()
    manifest = (bench.root / "global_step_1" / "manifest.json").stat().st_mtime_ns
    assert await bench.ask(1) == first
    assert await bench.saved(1) == saved
    kept = [message for message in bench.sent if isinstance(message, m.StateCopied | m.CheckpointSaved)]
    assert kept == [first, saved, first, saved]
    assert (bench.root / "global_step_1" / "manifest.json").stat().st_mtime_ns == manifest


async def test_training_goes_on_while_files_are_written_and_the_next_request_waits(bench: Bench, held_up: Gates):
    """The checkpoint holds the policy as it was when it was copied."""
    writing, may_go_on = held_up
    await bench.train(1)
    before = bench.policy.table_VV.detach().clone()
    await bench.ask(1)
    assert await asyncio.to_thread(writing.wait, BLOCKED_S)
    assert not (bench.root / "global_step_1").exists(), "it has no name before it is complete"
    assert (await lease(bench)).sequence == 5, "the devices are free again after the copy"
    await bench.train(2)
    second = asyncio.create_task(bench.ask(2))
    done, _ = await asyncio.wait({second}, timeout=0.2)
    assert not done, "one policy at a time"
    may_go_on.set()
    await second
    assert [(await bench.saved(0)).step, (await bench.saved(1)).step] == [1, 2]
    assert torch.equal(table_of(bench.root / "global_step_1" / "policy"), before)
    assert not torch.equal(table_of(bench.root / "global_step_2" / "policy"), before)
    assert (bench.root / "latest").resolve().name == "global_step_2"


async def test_a_policy_that_has_moved_on_cannot_be_saved(bench: Bench):
    await bench.train(1)
    await bench.train(2)
    saved = await bench.keep(1)
    assert "the checkpoint of step 1 in" in saved.error and "the policy is that of step 2 by now" in saved.error
    assert list(bench.root.glob("*")) == []


@pytest.mark.parametrize(
    "name", ["../escaped", "policy/config.json", "/etc/x", "..", ".hidden", "", "manifest.json", "trainer_state.json"]
)
async def test_a_coordinators_file_cannot_leave_the_folder_or_replace_another(bench: Bench, name: str):
    await bench.train(1)
    saved = await bench.keep(1, files={name: b"x"})
    assert f"the coordinator's file {name!r} cannot be in a checkpoint" in saved.error
    assert (saved.path, list(bench.root.glob("*"))) == ("", [])
    await bench.train(2)
    assert (await bench.keep(2, files=FILES)).error == ""


async def test_a_folder_that_vanishes_loses_the_checkpoint_and_nothing_else(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    await bench.train(1)
    await bench.keep(1)
    real = checkpoint.manifest_of

    def vanish(*args: object, **kwargs: object) -> bytes:
        shutil.rmtree(bench.root / ".global_step_2.draft")
        return real(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "manifest_of", vanish)
    await bench.train(2)
    saved = await bench.keep(2)
    assert f"the checkpoint of step 2 in {bench.root} came to nothing: " in saved.error
    assert "No such file or directory" in saved.error and "bytes, and" in saved.error
    monkeypatch.undo()
    assert checkpoints.damage(bench.root / "global_step_1") == ""
    await bench.train(3)
    assert (await bench.keep(3)).error == ""


async def test_a_rank_whose_disk_fails_is_named_and_training_goes_on(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    def fail(directory: Path) -> None:
        raise OSError(5, "Input/output error", str(directory))

    await bench.train(1)
    monkeypatch.setattr(bench.policy, "save", fail)
    saved = await bench.keep(1)
    assert "Input/output error" in saved.error and list(bench.root.glob("*")) == []
    monkeypatch.undo()
    await bench.train(2)
    assert (await bench.keep(2)).error == ""


async def test_a_new_trainer_removes_what_a_crash_has_left(bench: Bench, tmp_path: Path):
    await bench.train(1)
    await bench.keep(1)
    for root in (bench.root, tmp_path / "exports"):
        (root / ".global_step_7.draft" / "policy").mkdir(parents=True)
    await bench.worker.saver.start()
    assert sorted(path.name for path in bench.root.iterdir()) == ["global_step_1", "latest"]
    assert list((tmp_path / "exports").iterdir()) == []
    assert checkpoints.damage(bench.root / "global_step_1") == ""


async def test_the_trainer_ends_after_what_it_is_writing(bench: Bench, held_up: Gates):
    writing, may_go_on = held_up
    await bench.train(1)
    await bench.ask(1)
    assert await asyncio.to_thread(writing.wait, BLOCKED_S)
    ending = asyncio.create_task(bench.worker.saver.finish())
    done, _ = await asyncio.wait({ending}, timeout=0.1)
    assert not done
    may_go_on.set()
    await ending
    assert checkpoints.damage(bench.root / "global_step_1") == "" and (await bench.saved()).error == ""


async def test_what_takes_too_long_at_the_end_is_given_up_and_said(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    writing, real = threading.Event(), checkpoint.manifest_of

    def endless_manifest(*args: object, **kwargs: object) -> bytes:
        writing.set()
        assert bench.worker.saver._keeping.abandoned.wait(BLOCKED_S)
        return real(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "manifest_of", endless_manifest)
    monkeypatch.setattr("beamline.trainer.saving.DRAIN_S", 0.5)
    await bench.train(1)
    await bench.ask(1)
    assert await asyncio.to_thread(writing.wait, BLOCKED_S)
    await bench.worker.saver.finish()
    assert "is given up after 0.5 s; older checkpoints are as they were" in caplog.text
    assert "the trainer had to end before it was written" in (await bench.saved()).error
    assert list(bench.root.glob("*")) == []


async def test_an_export_shares_the_weights_with_its_checkpoint(bench: Bench, tmp_path: Path):
    await bench.train(1)
    saved = await bench.keep(1, export=True)
    policy = tmp_path / "exports" / "global_step_1" / "policy"
    assert (saved.export_path, saved.error) == (str(policy), "")
    kept = bench.root / "global_step_1" / "policy"
    assert sorted(path.name for path in policy.iterdir()) == sorted(path.name for path in kept.iterdir())
    assert os.path.samefile(policy / TABLE, kept / TABLE)
    assert not os.path.samefile(policy / "config.json", kept / "config.json"), "people change these"


async def test_an_export_may_come_alone_and_after_the_checkpoint(bench: Bench, tmp_path: Path):
    await bench.train(1)
    saved = await bench.keep(1, checkpoint=False, export=True)
    exported = tmp_path / "exports" / "global_step_1" / "policy"
    assert (saved.path, saved.export_path, saved.error) == ("", str(exported), "")
    assert torch.equal(table_of(exported), bench.policy.table_VV.detach())
    assert not bench.root.exists()
    await bench.train(2)
    await bench.keep(2)
    later = await bench.keep(2, checkpoint=False, export=True)
    assert os.path.samefile(Path(later.export_path) / TABLE, bench.root / "global_step_2" / "policy" / TABLE)


async def test_an_export_that_fails_leaves_its_checkpoint(bench: Bench, tmp_path: Path):
    (tmp_path / "exports").write_text("in the way")
    await bench.train(1)
    saved = await bench.keep(1, export=True)
    assert checkpoints.damage(Path(saved.path)) == ""
    assert saved.export_path == "" and f"the export of step 1 in {tmp_path / 'exports'} came to nothing" in saved.error


async def test_old_checkpoints_go_when_a_new_one_is_complete(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    with ThreadPoolExecutor(1) as thread:
        keeper = Bench(tmp_path / "keeper", thread, keep=2)
        await keeper.worker.publish_first()
        for step in (1, 2, 3):
            await keeper.train(step)
            await keeper.keep(step)
        keeper.rank.close()
    assert sorted(path.name for path in keeper.root.iterdir()) == ["global_step_2", "global_step_3", "latest"]
    assert f"removed the checkpoints of steps 1 in {keeper.root}" in caplog.text


@pytest.mark.skipif(not can_mount(), reason="the kernel lets nobody here mount a small disk of their own")
@pytest.mark.parametrize("when", ["copy", "seal"])
def test_a_full_disk_loses_the_checkpoint_and_nothing_else(when: str, tmp_path: Path):
    """A disk of 1 MiB: step 1 fits, step 2 does not, step 3 does again."""
    told = on_small_disk(sys.executable, tmp_path, when)
    assert [saved["error"] == "" for saved in told["saved"]] == [True, False, True]
    error = told["saved"][1]["error"]
    assert f"the checkpoint of step 2 in {tmp_path / 'disk' / 'ckpt'} came to nothing: " in error
    assert "No space left on device" in error and "it takes about 1,352 bytes, and" in error
    assert told["after"] == {"damage of step 1": "", "files": ["global_step_1", "latest"]}
    assert told["end"] == {"damage of step 3": "", "files": ["global_step_1", "global_step_3", "latest"]}
