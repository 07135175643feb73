"""Weights through shared memory: what is read is what was written, and what is damaged is named."""

import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import msgspec
import numpy as np
import pytest

from beamline.protocol.errors import WeightError
from beamline.weights.manifest import TensorEntry, WeightManifest
from beamline.weights.shm import NamedTensor, ShmExporter, ShmReader


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path("/dev/shm") / f"beamline-test-{uuid4().hex}"
    yield path
    for left in path.glob("*"):
        left.unlink()
    if path.exists():
        path.rmdir()


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


def test_what_is_read_is_what_was_written(folder: Path) -> None:
    written = tensors()
    manifest = WeightManifest.decode(ShmExporter(folder).export(3, iter(written)).encode())
    reader = ShmReader.open(manifest)
    reader.verify()
    read = list(reader.tensors())
    assert [entry.name for entry, _ in read] == [name for name, *_ in written]
    for (entry, content), (_, dtype, shape, buffer) in zip(read, written, strict=True):
        assert (entry.dtype, tuple(entry.shape)) == (dtype, tuple(shape))
        assert content.tobytes() == (memoryview(buffer).cast("B").tobytes() if memoryview(buffer).nbytes else b"")
        assert content.readonly


def test_the_folder_is_private_and_keeps_the_newest_segments(folder: Path) -> None:
    exporter = ShmExporter(folder, keep=2)
    manifests = [exporter.export(version, tensors(version)) for version in range(4)]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(str(path) for path in folder.iterdir()) == [manifest.segment for manifest in manifests[2:]]
    with pytest.raises(WeightError, match="policy 0: cannot open segment"):
        ShmReader.open(manifests[0])


def test_an_open_reader_outlives_its_segment(folder: Path) -> None:
    exporter = ShmExporter(folder, keep=1)
    reader = ShmReader.open(exporter.export(0, tensors(0)))
    exporter.export(1, tensors(1))
    reader.verify()


def test_a_failed_export_leaves_nothing(folder: Path) -> None:
    def broken() -> Iterator[NamedTensor]:
        yield from tensors()
        raise RuntimeError("the trainer died")

    with pytest.raises(RuntimeError, match="trainer died"):
        ShmExporter(folder).export(0, broken())
    assert list(folder.iterdir()) == []


def test_a_changed_byte_is_found_by_name(folder: Path) -> None:
    manifest = ShmExporter(folder).export(5, tensors())
    entry = manifest.tensors[1]
    descriptor = os.open(manifest.segment, os.O_RDWR)
    byte = os.pread(descriptor, 1, entry.offset + 4)
    os.pwrite(descriptor, bytes([byte[0] ^ 1]), entry.offset + 4)
    os.close(descriptor)
    with pytest.raises(
        WeightError, match=rf"policy 5: tensor model\.b\.weight has checksum .*expected {entry.checksum}"
    ):
        ShmReader.open(manifest).verify()


def test_a_cut_segment_is_refused(folder: Path) -> None:
    manifest = ShmExporter(folder).export(5, tensors())
    os.truncate(manifest.segment, manifest.num_bytes - 1)
    with pytest.raises(WeightError, match=f"has {manifest.num_bytes - 1} bytes, expected {manifest.num_bytes}"):
        ShmReader.open(manifest)


def test_a_buffer_that_does_not_fit_its_shape_is_refused(folder: Path) -> None:
    wrong = [("model.a", "float32", (2, 2), np.zeros(3, dtype=np.float32))]
    with pytest.raises(WeightError, match=r"tensor model\.a: 12 bytes, expected 16 for float32 \[2, 2\]"):
        ShmExporter(folder).export(0, wrong)


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
    wire = {"type": "WeightManifest/1", "policy_version": 1, "transport": "shm", "segment": "/x", "num_bytes": 1000}
    with pytest.raises(WeightError, match=text):
        WeightManifest.decode(msgspec.msgpack.encode({**wire, "tensors": entries}))


def test_bytes_that_are_no_manifest_are_refused() -> None:
    with pytest.raises(WeightError, match="3 bytes are not a weight manifest"):
        WeightManifest.decode(b"abc")
    assert TensorEntry.__struct_config__.forbid_unknown_fields
