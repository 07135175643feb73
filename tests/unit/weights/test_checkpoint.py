"""Weights through files: what only this transport promises. The rest is in test_transports.py."""

import json
import os
import resource
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from beamline.protocol.errors import WeightError
from beamline.weights.checkpoint import CheckpointOwner, CheckpointReader
from beamline.weights.manifest import CheckpointPlace, WeightManifest, merge
from beamline.weights.safetensors_file import DTYPES, HEADER_BYTES
from beamline.weights.tensors import ITEM_BYTES, STORAGE, Shard
from weight_shards import assert_equal, example, export, fetched, shards_of

SUPPORTED = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "support")}
"""For a process of this file's own."""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[CheckpointOwner]:
    owner = CheckpointOwner(tmp_path / "weights", 0)
    yield owner
    owner.close()


def place_of(manifest: WeightManifest) -> CheckpointPlace:
    (place,) = manifest.places
    assert isinstance(place, CheckpointPlace)
    return place


def test_a_file_is_a_safetensors_file(owner: CheckpointOwner, tmp_path: Path) -> None:
    place = place_of(export(owner, 3))
    assert Path(place.path) == tmp_path / "weights" / "policy-00000003" / "rank-00000.safetensors"
    with safe_open(place.path, framework="pt") as file:
        assert sorted(file.keys()) == sorted(tensor.name for tensor in example(3))
        for tensor in example(3):
            read = file.get_tensor(tensor.name)
            assert str(read.dtype) == f"torch.{tensor.dtype}"
            assert tuple(read.shape) == tensor.values.shape
            assert read.reshape(-1).view(torch.uint8).numpy().tobytes() == tensor.values.tobytes()


def test_a_piece_is_named_after_where_it_starts(owner: CheckpointOwner) -> None:
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    for piece in Shard.whole("w", "float32", whole).cut(1, 2):
        owner.export(int(piece.start[1]), [piece, Shard.whole("v", "float32", whole)])
    with safe_open(owner.describe().places[0].path, framework="np") as file:
        assert sorted(file.keys()) == ["v", "w@0,3"]
        np.testing.assert_array_equal(file.get_tensor("w@0,3"), whole[:, 3:])
        np.testing.assert_array_equal(file.get_tensor("v"), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_has_safetensors_name_for_it(owner: CheckpointOwner, dtype: str) -> None:
    owner.export(0, [Shard.whole("w", dtype, np.zeros((2, 3), STORAGE[ITEM_BYTES[dtype]]))])
    with safe_open(owner.describe().places[0].path, framework="pt") as file:
        assert str(file.get_tensor("w").dtype) == f"torch.{dtype}"


def test_a_header_longer_than_was_set_aside_moves_the_tensors_up(owner: CheckpointOwner) -> None:
    for version in range(2):
        shards = [Shard.whole(f"w{n:0200d}", "float32", np.full(300, n + version, np.float32)) for n in range(1500)]
        owner.export(version, shards)
        place = place_of(merge([owner.describe()]))
        (length,) = struct.unpack("<Q", Path(place.path).read_bytes()[:8])
        assert length > HEADER_BYTES
        assert Path(place.path).stat().st_size == place.num_bytes == 8 + length + 1500 * 1200
        read = fetched(merge([owner.describe()]))
        for number, values in enumerate(read.values()):
            assert set(values.view(np.float32)) == {number + version}


def test_a_box_that_is_exported_twice_is_refused(owner: CheckpointOwner) -> None:
    shard = Shard.whole("w", "float32", np.zeros(2, np.float32))
    with pytest.raises(WeightError, match=r"tensor w: the box at \[0\] was exported twice"):
        owner.export(0, [shard, shard])


@pytest.mark.parametrize(
    ("cut", "text"), [(1, "it has .* bytes, expected .*: it was cut short"), (None, "No such file")]
)
def test_a_file_that_is_cut_short_or_gone_is_named(owner: CheckpointOwner, cut: int | None, text: str) -> None:
    manifest = export(owner, 0)
    path = Path(place_of(manifest).path)
    if cut is None:
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size - cut)
    with pytest.raises(WeightError, match=f"policy 0: cannot read its weights from {path}: .*{text}"):
        fetched(manifest)


def test_a_file_that_is_cut_short_while_it_is_read_ends_no_process(owner: CheckpointOwner) -> None:
    manifest = export(owner, 0)
    place = place_of(manifest)
    attached = CheckpointReader().attach(place, 0)
    os.truncate(place.path, 4096)
    with pytest.raises(WeightError, match=f"policy 0: cannot read its weights from {place.path}: .*cut short"):
        attached.fill([(0, place.num_bytes)])


def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(WeightError, match=r"it has 0 bytes, expected 9"):
        CheckpointReader().attach(CheckpointPlace(num_bytes=9, path=str(tmp_path / "pipe")), 0)


def test_what_a_killed_owner_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    export(CheckpointOwner(tmp_path, 0), 0)
    kept = CheckpointOwner(tmp_path, 1)
    manifest = export(kept, 0)
    (tmp_path / "policy-00000000" / "rank-00000.safetensors.draft").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    CheckpointOwner(tmp_path, 0).close()
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["notes.txt", "rank-00001.safetensors"]
    assert_equal(fetched(manifest), example(0))
    kept.close()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_full_disk_is_told_and_the_policy_before_is_still_there(tmp_path: Path) -> None:
    """In a process of its own, whose files are limited for real."""
    command = [sys.executable, __file__, str(tmp_path / "weights")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=SUPPORTED)
    assert done.returncode == 0, done.stderr
    told, last = done.stdout.splitlines()
    assert "cannot write weights to" in told and told.endswith("make room, or choose another weights.directory")
    assert json.loads(last) == ["policy-00000000", "rank-00000.safetensors"]


def test_a_directory_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightError, match=r"cannot write weights to .*file/x: Not a directory: choose another"):
        CheckpointOwner(tmp_path / "file" / "x", 0)


def fill_up(directory: Path) -> None:
    """Write one policy, then another for which there is no room."""
    owner = CheckpointOwner(directory, 0)
    manifest = export(owner, 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    try:
        owner.export(1, shards_of(example(1)))
    except WeightError as error:
        print(error)
    assert_equal(fetched(manifest), example(0))
    print(json.dumps(sorted(path.name for path in directory.rglob("*"))))


if __name__ == "__main__":
    fill_up(Path(sys.argv[1]))
