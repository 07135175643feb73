"""Weights through shared memory: what is read is what was written, and what is damaged, gone or forged is named."""

import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from beamline.protocol.errors import WeightError
from beamline.weights import passing
from beamline.weights.manifest import TensorEntry, WeightManifest
from beamline.weights.shm import ShmExporter, ShmReader
from beamline.weights.tensors import NamedTensor


@pytest.fixture
def exporter(tmp_path: Path) -> Iterator[ShmExporter]:
    exporter = ShmExporter(tmp_path / "weights")
    yield exporter
    exporter.close()


def tensors(seed: int = 0) -> list[NamedTensor]:
    random = np.random.default_rng(seed)
    weight = random.standard_normal((7, 33), dtype=np.float32)
    half = random.integers(0, 2**16, (3, 5), dtype=np.uint16).view(np.uint8)
    return [
        ("model.a.weight", "float32", (7, 33), weight),
        ("model.b.weight", "bfloat16", (3, 5), half),
        ("model.scale", "float32", (), np.float32(2.5).tobytes()),
        ("model.ids", "int64", (4,), np.arange(4)),
        ("model.empty", "float32", (0, 4), b""),
    ]


def content(reader: ShmReader) -> dict[str, bytes]:
    return {entry.name: bytes(view) for entry, view in reader.tensors()}


def test_what_is_read_is_what_was_written(exporter: ShmExporter) -> None:
    written = tensors()
    manifest = WeightManifest.decode(exporter.export(3, iter(written)).encode())
    reader = ShmReader.open(manifest)
    reader.verify()
    read = list(reader.tensors())
    assert [entry.name for entry, _ in read] == [name for name, *_ in written]
    for (entry, view), (_, dtype, shape, buffer) in zip(read, written, strict=True):
        assert (entry.dtype, tuple(entry.shape)) == (dtype, tuple(shape))
        assert view.tobytes() == (memoryview(buffer).cast("B").tobytes() if memoryview(buffer).nbytes else b"")
        assert view.readonly
    reader.close()


def test_the_newest_two_policies_are_kept(exporter: ShmExporter) -> None:
    manifests = [exporter.export(version, tensors(version)) for version in range(5)]
    for manifest in manifests[3:]:
        reader = ShmReader.open(manifest)
        reader.verify()
        reader.close()
    with pytest.raises(WeightError, match=r"policy 2: .* refuses its weights: the policies that are kept are 3, 4"):
        ShmReader.open(manifests[2])


def test_two_segments_serve_a_run_in_which_readers_let_go(exporter: ShmExporter) -> None:
    before = open_segments()
    for version in range(6):
        ShmReader.open(exporter.export(version, tensors(version))).close()
        until(lambda: not exporter.num_readers)
    assert open_segments() - before == 2


def test_what_is_read_is_not_written_over(exporter: ShmExporter) -> None:
    reader = ShmReader.open(exporter.export(0, tensors(0)))
    before = content(reader)
    for version in range(1, 6):
        exporter.export(version, tensors(version))
    assert content(reader) == before
    reader.verify()
    reader.close()


def test_the_memory_of_a_reader_that_was_killed_is_written_again(exporter: ShmExporter) -> None:
    manifest = exporter.export(0, tensors(0))
    child = subprocess.Popen([sys.executable, __file__, manifest.encode().hex()], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.read(4) == b"open"
    assert exporter.num_readers == 1
    child.kill()
    child.wait()
    until(lambda: exporter.num_readers == 0)
    before = open_segments()
    for version in range(1, 5):
        exporter.export(version, tensors(version))
    assert open_segments() - before == 1


def test_a_reader_outlives_its_owner(exporter: ShmExporter) -> None:
    reader = ShmReader.open(exporter.export(0, tensors(0)))
    exporter.close()
    reader.verify()
    with pytest.raises(WeightError, match="policy 0: cannot get its weights"):
        ShmReader.open(reader.manifest)


def test_a_reader_can_neither_write_nor_resize(exporter: ShmExporter, tmp_path: Path) -> None:
    manifest = exporter.export(0, tensors())
    handed = passing.Handed(Path(manifest.place.socket), 0)
    with pytest.raises(OSError):
        os.pwrite(handed.descriptor, b"x", 0)
    with pytest.raises(OSError):
        os.ftruncate(handed.descriptor, 1)
    writable = f"/proc/self/fd/{handed.descriptor}"
    with pytest.raises(OSError), open(writable, "r+b") as again:
        mmap.mmap(again.fileno(), manifest.num_bytes)
    handed.close()


def test_memory_that_could_be_cut_short_is_refused(exporter: ShmExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = exporter.export(0, tensors())
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, manifest.num_bytes)
    receive = passing.Handed._receive
    monkeypatch.setattr(passing.Handed, "_receive", lambda *args: (receive(*args)[0], os.dup(loose)))
    with pytest.raises(WeightError, match="policy 0: the weights' segment is not sealed"):
        ShmReader.open(manifest)
    os.ftruncate(loose, 7)
    with pytest.raises(WeightError, match=rf"has 7 bytes, expected {manifest.num_bytes}"):
        ShmReader.open(manifest)
    os.close(loose)


def test_a_failed_export_leaves_nothing(exporter: ShmExporter) -> None:
    def broken() -> Iterator[NamedTensor]:
        yield from tensors()
        raise RuntimeError("the trainer died")

    before = open_segments()
    with pytest.raises(RuntimeError, match="trainer died"):
        exporter.export(0, broken())
    assert open_segments() == before
    reader = ShmReader.open(exporter.export(0, tensors()))
    reader.verify()
    reader.close()


def test_a_changed_byte_is_found_by_name(exporter: ShmExporter) -> None:
    manifest = exporter.export(5, tensors())
    entry = manifest.tensors[1]
    exporter._pool._versions[5]._bytes[entry.offset + 4] ^= 1
    reader = ShmReader.open(manifest)
    with pytest.raises(
        WeightError, match=rf"policy 5: tensor model\.b\.weight has checksum .*expected {entry.checksum}"
    ):
        reader.verify()
    reader.close()


def test_a_policy_of_another_layout_is_refused(exporter: ShmExporter) -> None:
    for version in range(2):
        exporter.export(version, tensors())
    with pytest.raises(WeightError, match="do not fit the .* of the policy before"):
        exporter.export(2, [*tensors(), ("model.more", "float32", (4096,), np.zeros(4096, np.float32))])


HOSTILE = {
    "a pickle": b"cos\nsystem\n(S'id'\ntR.",
    "a huge frame": b"\xff\xff\xff\x7f" + b"x" * 64,
    "another message": passing._frame(passing.Granted(5)),
    "an unknown field": b"\x20\x00\x00\x00" + msgspec.msgpack.encode({"type": "Attach/1", "policy_version": 0, "x": 1}),
    "half a frame": b"\x08\x00",
}


@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_bytes_get_a_refusal_and_no_memory(exporter: ShmExporter, payload: bytes) -> None:
    manifest = exporter.export(0, tensors())
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(10)
        peer.connect(manifest.place.socket)
        peer.sendall(payload)
        peer.shutdown(socket.SHUT_WR)
        answer, descriptors, _, _ = socket.recv_fds(peer, 4096, 4)
    assert b"Refused/1" in answer and not descriptors
    ShmReader.open(manifest).close()


def test_a_peer_that_says_nothing_is_hung_up_on(exporter: ShmExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passing, "REQUEST_DEADLINE_S", 0.1)
    manifest = exporter.export(0, tensors())
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(10)
        peer.connect(manifest.place.socket)
        assert b"Refused/1" in peer.recv(4096)


def test_another_user_is_turned_away(exporter: ShmExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = exporter.export(0, tensors())
    monkeypatch.setattr(passing, "_peer_user", lambda _: os.geteuid() + 1)
    with pytest.raises(WeightError, match=f"user {os.geteuid() + 1} may not read the weights of user {os.geteuid()}"):
        ShmReader.open(manifest)


def test_an_owner_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passing, "ATTACH_DEADLINE_S", 0.1)
    path = tmp_path / "mute.sock"
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(path))
        mute.listen()
        with pytest.raises(WeightError, match=rf"policy 3: cannot get its weights from {path}: no answer within 0.1 s"):
            passing.Handed(path, 3)


def test_memory_that_is_full_is_told(exporter: ShmExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WeightError, match="shared memory is full: 924 bytes more are needed after 0"):
        exporter.export(0, tensors())


def test_closing_hangs_up_and_removes_the_socket(tmp_path: Path) -> None:
    exporter = ShmExporter(tmp_path / "weights")
    reader = ShmReader.open(exporter.export(0, tensors()))
    threads = threading.active_count()
    exporter.close()
    until(lambda: threading.active_count() < threads)
    assert list((tmp_path / "weights").iterdir()) == []
    assert (tmp_path / "weights").stat().st_mode & 0o777 == 0o700
    reader.close()


def open_segments() -> int:
    """Of this process."""
    descriptors = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return len({path.stat().st_ino for path in descriptors if "beamline-weights" in os.readlink(path)})


def until(condition, deadline_s: float = 10.0) -> None:
    done = threading.Event()
    for _ in range(int(deadline_s / 0.01)):
        if condition():
            return
        done.wait(0.01)
    raise AssertionError("it did not come true")


def test_a_buffer_that_does_not_fit_its_shape_is_refused(exporter: ShmExporter) -> None:
    wrong = [("model.a", "float32", (2, 2), np.zeros(3, dtype=np.float32))]
    with pytest.raises(WeightError, match=r"tensor model\.a: 12 bytes, expected 16 for float32 \[2, 2\]"):
        exporter.export(0, wrong)


def entry(**changes: object) -> dict[str, object]:
    values: dict[str, object] = {"name": "w", "dtype": "float32", "shape": [2], "offset": 0, "num_bytes": 8}
    return {**values, "checksum": "0" * 16, **changes}


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ([entry(dtype="float33")], "dtype 'float33'"),
        ([entry(num_bytes=9)], "9 bytes, expected 8"),
        ([entry(offset=8)], "offset 8 is not a multiple"),
        ([entry(), entry(offset=256)], "tensor w appears twice"),
        ([entry(shape=[100], num_bytes=400), entry(name="v", offset=256)], "lies inside the one before"),
        ([entry(offset=1024)], "tensors end at 1032"),
        ([entry(extra=1)], "unknown field `extra`"),
    ],
)
def test_an_impossible_manifest_is_refused(entries: list[dict[str, object]], text: str) -> None:
    wire = {
        "type": "WeightManifest/1",
        "policy_version": 1,
        "place": {"type": "shm", "socket": "/x"},
        "num_bytes": 1000,
    }
    with pytest.raises(WeightError, match=text):
        WeightManifest.decode(msgspec.msgpack.encode({**wire, "tensors": entries}))


def test_bytes_that_are_no_manifest_are_refused() -> None:
    with pytest.raises(WeightError, match="3 bytes are not a weight manifest"):
        WeightManifest.decode(b"abc")
    assert TensorEntry.__struct_config__.forbid_unknown_fields


if __name__ == "__main__":
    kept = ShmReader.open(WeightManifest.decode(bytes.fromhex(sys.argv[1])))
    print("open", end="", flush=True)
    threading.Event().wait()
