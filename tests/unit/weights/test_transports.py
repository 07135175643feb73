"""What every transport promises, whatever carries it. A further one is another `Pair` in `PAIRS`."""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from beamline.protocol.errors import WeightError
from beamline.weights.choice import owner_of
from beamline.weights.cuda_ipc import CudaOwner
from beamline.weights.manifest import CheckpointPlace, WeightManifest, merge
from beamline.weights.nixl import NixlOwner
from beamline.weights.shm import ShmOwner
from beamline.weights.staging import Stage
from beamline.weights.tensors import Shard
from beamline.weights.transport import Owner
from shared_memory import segments
from weight_shards import assert_equal, bits_of, example, export, fetched, shards_of, until


@dataclass(frozen=True)
class Pair:
    """A transport's two ends; `choice.reader_of` makes the reader's."""

    transport: str
    flip: Callable[[Owner, WeightManifest, int], None]
    """Change the byte at an offset of the policy that was exported last, where the owner keeps it."""


def flip_in_memory(owner: Owner, manifest: WeightManifest, offset: int) -> None:
    assert isinstance(owner, ShmOwner)
    owner._pool._versions[manifest.policy_version]._bytes[offset] ^= 1


def flip_in_registered(owner: Owner, manifest: WeightManifest, offset: int) -> None:
    assert isinstance(owner, NixlOwner)
    owner._segments[-1]._bytes[offset] ^= 1


def flip_on_gpu(owner: Owner, manifest: WeightManifest, offset: int) -> None:
    assert isinstance(owner, CudaOwner)
    address, byte = owner._pool._versions[manifest.policy_version]._addresses[0] + offset, np.empty(1, np.uint8)
    owner._gpu.copy_to_host(byte, address)
    owner._gpu.copy_from_host(address, byte ^ 1)


def flip_in_file(owner: Owner, manifest: WeightManifest, offset: int) -> None:
    (place,) = manifest.places
    assert isinstance(place, CheckpointPlace)
    with open(place.path, "r+b") as file:
        (before,) = os.pread(file.fileno(), 1, offset)
        os.pwrite(file.fileno(), bytes([before ^ 1]), offset)


PAIRS = [
    pytest.param(Pair("shm", flip_in_memory), id="shm"),
    pytest.param(Pair("nixl", flip_in_registered), id="nixl"),
    pytest.param(Pair("checkpoint", flip_in_file), id="checkpoint"),
    pytest.param(Pair("cuda_ipc", flip_on_gpu), id="cuda_ipc", marks=pytest.mark.gpu),
]


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Pair:
    return request.param


@pytest.fixture
def owner(pair: Pair, tmp_path: Path) -> Iterator[Owner]:
    owner = owner_of(pair.transport, tmp_path / "weights", 0)
    yield owner
    owner.close()


def test_what_is_read_is_what_was_written(owner: Owner) -> None:
    assert_equal(fetched(export(owner, 3)), example(3))


def test_a_policy_of_two_ranks_is_put_together(pair: Pair, tmp_path: Path) -> None:
    owners = [owner_of(pair.transport, tmp_path / "weights", rank) for rank in range(2)]
    for rank, owner in enumerate(owners):
        owner.export(1, shards_of(example(), rank, 2))
    manifest = merge([owner.describe() for owner in owners])
    assert {len(tensor.pieces) for tensor in manifest.tensors} == {1, 2}
    assert_equal(fetched(manifest), example())
    for owner in owners:
        owner.close()


def test_only_what_is_needed_is_fetched(pair: Pair, tmp_path: Path) -> None:
    """The other rank's memory is damaged, or gone with it, and that is not even noticed."""
    owners = [owner_of(pair.transport, tmp_path / "weights", rank) for rank in range(2)]
    written = {tensor.name: tensor.values for tensor in example()}
    for rank, owner in enumerate(owners):
        owner.export(1, shards_of(example(), rank, 2))
    manifest = merge([owner.describe() for owner in owners])
    stage = Stage({"model.large": [((0, 700), (500, 1000))], "model.scale": [()]})
    owners[1].close()
    with pytest.raises(WeightError, match="policy 1"):
        stage.fetch(manifest)
    stage.close()
    stage = Stage({"model.large": [((0, 700), (0, 500))], "model.scale": [()]})
    staged = stage.fetch(manifest)
    assert staged.num_bytes == 700 * 500 * 4 + 4
    read = bits_of(staged)
    np.testing.assert_array_equal(read["model.large"][:, :500], written["model.large"][:, :500])
    assert sorted(read) == ["model.large", "model.scale"]
    staged.fence()
    stage.close()
    owners[0].close()


def test_the_newest_two_policies_are_kept(owner: Owner) -> None:
    manifests = [export(owner, version) for version in range(5)]
    for version in (3, 4):
        assert_equal(fetched(manifests[version]), example(version))
    with pytest.raises(WeightError, match="policy 2: "):
        fetched(manifests[2])


def test_what_is_read_is_not_written_over(owner: Owner, stage: Stage) -> None:
    staged = stage.fetch(export(owner, 0))
    for version in range(1, 6):
        export(owner, version)
    staged.verify()
    assert_equal(bits_of(staged), example(0))
    staged.fence()


def test_policies_come_and_go_through_one_reader(owner: Owner, stage: Stage) -> None:
    for version in [*range(6), *range(3)]:
        staged = stage.fetch(export(owner, version))
        assert_equal(bits_of(staged), example(version))
        staged.fence()
        staged.fence()


def test_a_flipped_byte_is_found_by_name(pair: Pair, owner: Owner, stage: Stage) -> None:
    manifest = export(owner, 5)
    entry = manifest.tensors[1]
    pair.flip(owner, manifest, entry.pieces[0].offset + 4)
    with pytest.raises(WeightError, match=r"policy 5: tensor model\.b\.weight has checksum .*") as raised:
        stage.fetch(manifest)
    assert f"expected {entry.pieces[0].checksum}" in str(raised.value)
    pair.flip(owner, manifest, entry.pieces[0].offset + 4)
    stage.fetch(manifest).fence()


def test_an_owner_that_has_closed_is_told(owner: Owner) -> None:
    manifest = export(owner, 0)
    owner.close()
    with pytest.raises(WeightError, match=r"policy 0: .*weights"):
        fetched(manifest)


def test_an_export_that_breaks_off_leaves_the_policy_before(owner: Owner) -> None:
    manifest = export(owner, 0)

    def broken() -> Iterator[Shard]:
        yield from shards_of(example(1))[:2]
        raise RuntimeError("the trainer died")

    for _ in range(3):
        with pytest.raises(RuntimeError, match="trainer died"):
            owner.export(1, broken())
        assert owner.describe().policy_version == 0
        assert_equal(fetched(manifest), example(0))
    assert_equal(fetched(export(owner, 1)), example(1))


def test_a_shard_is_let_go_before_the_next_one_is_made(owner: Owner) -> None:
    """The owner never holds a second copy of the model."""
    alive = 0

    class Counted(np.ndarray):
        def __del__(self) -> None:
            nonlocal alive
            alive -= self.base is None

    most = 0

    def shards() -> Iterator[Shard]:
        nonlocal alive, most
        for number in range(8):
            values = np.ndarray.__new__(Counted, (1000,), np.float32)
            values[:] = number
            alive += 1
            most = max(most, alive)
            yield Shard.whole(f"w{number}", "float32", values)
            del values

    owner.export(0, shards())
    assert most <= 2
    assert alive == 0


def test_nothing_is_left_behind(pair: Pair, tmp_path: Path) -> None:
    # One round first: a library that is loaded for good is no trace of a policy.
    one_round(pair, tmp_path)
    before = traces(tmp_path)
    one_round(pair, tmp_path)
    until(lambda: traces(tmp_path) <= before)


def one_round(pair: Pair, directory: Path) -> None:
    owner, stage = owner_of(pair.transport, directory / "weights", 0), Stage()
    stage.fetch(export(owner, 0)).fence()
    held = stage.fetch(export(owner, 1))
    export(owner, 2)
    owner.close()
    held.fence()
    stage.close()


def traces(directory: Path) -> Counter[str]:
    """Descriptors and threads of this process, files, and named shared memory."""
    threads = (thread.name for thread in threading.enumerate())
    found = Counter([*threads, *map(str, directory.rglob("*")), *segments()])
    found["descriptors"] = len(os.listdir("/proc/self/fd"))
    return found
