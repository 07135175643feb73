"""Weights through shared memory: what only this transport promises. The rest is in test_transports.py."""

import mmap
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from beamline.protocol.errors import WeightError
from beamline.weights import passing
from beamline.weights.manifest import ShmPlace, WeightManifest
from beamline.weights.shm import ShmOwner
from beamline.weights.staging import Stage
from beamline.weights.tensors import Shard
from weight_shards import assert_equal, bits_of, example, export, fetched, shards_of, until

SUPPORTED = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "support")}
"""For a process of this file's own."""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[ShmOwner]:
    owner = ShmOwner(tmp_path / "weights" / "rank-00000.sock")
    yield owner
    owner.close()


def place_of(manifest: WeightManifest) -> ShmPlace:
    (place,) = manifest.places
    assert isinstance(place, ShmPlace)
    return place


def test_nothing_is_copied(owner: ShmOwner, stage: Stage) -> None:
    """A whole tensor is the owner's memory: two readers of a policy have the same pages."""
    staged = stage.fetch(export(owner, 0))
    before = open_segments()
    for entry, content in staged.tensors():
        assert not entry.pieces or 0 in entry.shape or (isinstance(content, memoryview) and content.readonly)
    assert open_segments() == before == 1
    staged.fence()


def test_two_segments_serve_a_run_in_which_readers_let_go(owner: ShmOwner, stage: Stage) -> None:
    for version in range(6):
        stage.fetch(export(owner, version)).fence()
        until(lambda: not owner.num_readers)
    assert open_segments() == 2


def test_a_reader_that_stays_behind_costs_one_segment_until_it_lets_go(owner: ShmOwner, stage: Stage) -> None:
    behind = stage.fetch(export(owner, 0))
    for version in range(1, 5):
        export(owner, version)
    assert open_segments() == 3
    behind.fence()
    until(lambda: not owner.num_readers)
    for version in range(5, 7):
        export(owner, version)
    assert open_segments() == 2


def test_a_reader_keeps_no_memory_of_an_owner_before(tmp_path: Path, stage: Stage) -> None:
    """A trainer is started anew at the same socket, again and again."""
    for version in range(6):
        owner = ShmOwner(tmp_path / "rank-00000.sock")
        stage.fetch(export(owner, version)).fence()
        owner.close()
    assert mapped_segments() <= 2


def test_the_memory_of_a_reader_that_was_killed_is_written_again(owner: ShmOwner) -> None:
    manifest = export(owner, 0)
    command = [sys.executable, __file__, manifest.encode().hex()]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, env=SUPPORTED)
    assert child.stdout is not None and child.stdout.read(4) == b"open"
    assert owner.num_readers == 1
    child.kill()
    child.wait()
    child.stdout.close()
    until(lambda: owner.num_readers == 0)
    for version in range(1, 5):
        export(owner, version)
    assert open_segments() == 2


def test_a_reader_outlives_its_owner(owner: ShmOwner, stage: Stage) -> None:
    staged = stage.fetch(export(owner, 0))
    owner.close()
    staged.verify()
    assert_equal(bits_of(staged), example(0))
    staged.fence()


def test_a_reader_can_neither_write_nor_resize(owner: ShmOwner) -> None:
    place = place_of(export(owner, 0))
    handed = passing.Handed(Path(place.socket), 0)
    with pytest.raises(OSError):
        os.pwrite(handed.descriptor, b"x", 0)
    with pytest.raises(OSError):
        os.ftruncate(handed.descriptor, 1)
    with pytest.raises(OSError), open(f"/proc/self/fd/{handed.descriptor}", "r+b") as again:
        mmap.mmap(again.fileno(), place.num_bytes)
    os.close(handed.descriptor)
    handed.close()


def test_memory_that_could_be_cut_short_is_refused(owner: ShmOwner, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = export(owner, 0)
    num_bytes = place_of(manifest).num_bytes
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, num_bytes)
    receive = passing.Handed._receive

    def swapped(handed: passing.Handed, num_descriptors: int) -> int:
        os.close(receive(handed, num_descriptors))
        return os.dup(loose)

    monkeypatch.setattr(passing.Handed, "_receive", swapped)
    with pytest.raises(WeightError, match="policy 0: the weights' segment is not sealed"):
        fetched(manifest)
    os.ftruncate(loose, 7)
    with pytest.raises(WeightError, match=rf"has 7 bytes, expected {num_bytes}"):
        fetched(manifest)
    os.close(loose)
    until(lambda: owner.num_readers == 0)


def test_a_failed_export_leaves_no_segment(owner: ShmOwner) -> None:
    def broken() -> Iterator[Shard]:
        yield from shards_of(example())
        raise RuntimeError("the trainer died")

    with pytest.raises(RuntimeError, match="trainer died"):
        owner.export(0, broken())
    assert open_segments() == 0


@pytest.mark.parametrize("rows", [1, 5000])
def test_a_policy_of_another_layout_is_refused(owner: ShmOwner, rows: int) -> None:
    for version in range(2):
        owner.export(version, [Shard.whole("w", "float32", np.zeros(2000, np.float32))])
    with pytest.raises(WeightError, match=r"do not fit the 8000 of the policy before"):
        owner.export(2, [Shard.whole("w", "float32", np.zeros(rows, np.float32))])


def test_another_user_is_turned_away(owner: ShmOwner, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = export(owner, 0)
    monkeypatch.setattr(passing, "_peer_user", lambda _: os.geteuid() + 1)
    with pytest.raises(WeightError, match=f"user {os.geteuid() + 1} may not read the weights of user {os.geteuid()}"):
        fetched(manifest)


@pytest.mark.parametrize("when", ["in it", "before it"])
def test_memory_that_is_full_is_told_and_the_policy_before_is_still_there(tmp_path: Path, when: str) -> None:
    """In a process of its own, whose memory of this kind is limited for real."""
    command = [sys.executable, __file__, "full", str(tmp_path / "weights"), when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=SUPPORTED)
    assert done.returncode == 0, done.stderr
    text = {"in it": "shared memory is full: 2800000 bytes more are needed after", "before it": "cannot set aside"}
    assert text[when] in done.stdout
    assert done.stdout.splitlines()[-1] == "policy 0 is read; segments 1, readers 0, then 0 and 0 files"


def test_closing_hangs_up_and_removes_the_socket(tmp_path: Path, stage: Stage) -> None:
    threads = threading.active_count()
    owner = ShmOwner(tmp_path / "weights" / "rank-00000.sock")
    staged = stage.fetch(export(owner, 0))
    owner.close()
    assert threading.active_count() == threads
    assert list((tmp_path / "weights").iterdir()) == []
    assert (tmp_path / "weights").stat().st_mode & 0o777 == 0o700
    staged.fence()


def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightError, match=r"cannot listen at .*file/x\.sock: "):
        ShmOwner(tmp_path / "file" / "x.sock")
    with pytest.raises(WeightError, match=r"cannot listen at .*too long"):
        ShmOwner(tmp_path / ("x" * 120))


def open_segments() -> int:
    """Of the owners in this process."""
    descriptors = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return len({path.stat().st_ino for path in descriptors if "beamline-weights" in os.readlink(path)})


def mapped_segments() -> int:
    """That this process has mapped, as a reader or an owner."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[4] for line in lines if "beamline-weights" in line})


def fill_up(directory: Path, when: str) -> None:
    """Export one policy, then another for which there is no memory."""
    owner = ShmOwner(directory / "rank-00000.sock")
    manifest = export(owner, 0)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))

    def shards() -> Iterator[Shard]:
        limit()
        yield from shards_of(example(1))

    try:
        if when == "before it":
            limit()
        owner.export(1, shards())
    except WeightError as error:
        print(error)
    assert_equal(fetched(manifest), example(0))
    until(lambda: owner.num_readers == 0)
    segments, readers = open_segments(), owner.num_readers
    owner.close()
    files = len(list(directory.iterdir()))
    print(f"policy 0 is read; segments {segments}, readers {readers}, then {open_segments()} and {files} files")


if __name__ == "__main__":
    if sys.argv[1] == "full":
        fill_up(Path(sys.argv[2]), sys.argv[3])
    else:
        held = Stage().fetch(WeightManifest.decode(bytes.fromhex(sys.argv[1])))
        print("open", end="", flush=True)
        threading.Event().wait()
