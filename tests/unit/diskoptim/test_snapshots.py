"""A snapshot is a state file like any other, costs no second copy where it need not, and never changes."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from beamline.diskoptim import directory, errors, files
from beamline.diskoptim.disk_adamw import DiskAdamW
from beamline.diskoptim.errors import DirectoryError, DiskFull
from beamline.diskoptim.state_file import StateFile

Make = Callable[..., DiskAdamW]


def test_a_hard_link_does_not_change_when_training_goes_on(make: Make, tmp_path: Path) -> None:
    optimizer = make()
    optimizer.step()
    before = optimizer.read("weight")
    copied = optimizer.snapshot(tmp_path / "checkpoint", "rank-00000")
    assert copied.how == "hard link"
    assert [path.name for path in copied.paths] == ["rank-00000.state", "rank-00000.json"]
    for _ in range(4):
        optimizer.step()
    snapshot = StateFile.open(tmp_path / "checkpoint", "rank-00000")
    snapshot.verify()
    assert (snapshot.num_steps, optimizer.num_steps) == (1, 5)
    assert torch.equal(snapshot.read("weight").main, before.main)
    assert not torch.equal(optimizer.read("weight").main, before.main)


def test_snapshots_take_new_files_only_while_they_exist(make: Make, tmp_path: Path) -> None:
    """Three generations on the disk with one snapshot, two when it is deleted."""
    optimizer = make()
    optimizer.step()
    optimizer.snapshot(tmp_path / "checkpoint", "x")
    for _ in range(3):
        optimizer.step()
    linked = tmp_path / "checkpoint" / "x.state"
    assert linked.stat().st_ino not in {path.stat().st_ino for path in optimizer.directory.glob("*.state")}
    inodes = {path.stat().st_ino for path in optimizer.directory.glob("*.state")}
    linked.unlink()
    optimizer.step()
    assert {path.stat().st_ino for path in optimizer.directory.glob("*.state")} == inodes


def test_elsewhere_it_is_a_copy(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without hard links, as between filesystems; a reflink where the filesystem has them."""
    optimizer = make()
    optimizer.step()
    monkeypatch.setattr(os, "link", refuse_link)
    copied = optimizer.snapshot(tmp_path / "checkpoint", "x")
    assert copied.how == ("reflink" if has_reflinks(tmp_path) else "copy")
    for _ in range(2):
        optimizer.step()
    snapshot = StateFile.open(tmp_path / "checkpoint", "x")
    snapshot.verify()
    assert snapshot.num_steps == 1


def test_a_copy_without_room_leaves_nothing(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = make()
    monkeypatch.setattr(os, "link", refuse_link)
    monkeypatch.setattr(directory, "share_blocks", lambda *_: False)
    monkeypatch.setattr(errors, "free_bytes", lambda _: 1000)
    with pytest.raises(DiskFull, match=r"checkpoint has no room for a copy: \d+ bytes are needed, 1000 are free"):
        optimizer.snapshot(tmp_path / "checkpoint", "x")
    assert list((tmp_path / "checkpoint").iterdir()) == []
    optimizer.step()


def test_a_name_that_is_taken_is_left_alone(make: Make, tmp_path: Path) -> None:
    optimizer = make()
    optimizer.snapshot(tmp_path / "checkpoint", "x")
    optimizer.step()
    with pytest.raises(DirectoryError, match=r"x\.state or its header is there already"):
        optimizer.snapshot(tmp_path / "checkpoint", "x")
    assert StateFile.open(tmp_path / "checkpoint", "x").num_steps == 0


def test_training_goes_on_from_a_snapshot(make: Make, tmp_path: Path) -> None:
    """Imported in any order of names and into other buckets: the next step is the same."""
    first = make()
    first.step()
    first.snapshot(tmp_path / "checkpoint", "x")
    first.step()
    second = make(tmp_path / "other", bucket_bytes=200_000)
    snapshot = StateFile.open(tmp_path / "checkpoint", "x")
    second.import_state(((name, snapshot.read(name)) for name in reversed(snapshot.names())), snapshot.num_steps)
    assert second.num_steps == 1
    second.step()
    for name in snapshot.names():
        assert torch.equal(first.read(name).main, second.read(name).main)
        assert torch.equal(first.read(name).exp_avg_sq, second.read(name).exp_avg_sq)


def refuse_link(*_: object) -> None:
    raise OSError(18, "Invalid cross-device link")


def has_reflinks(folder: Path) -> bool:
    (folder / "one").write_bytes(b"1")
    return files.share_blocks(folder / "one", folder / "two")
