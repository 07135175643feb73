"""What every blob store promises, and what each can lose."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from beamline.protocol.errors import BlobError, PermissionDenied
from beamline.runtime.blob_store import BlobStore
from beamline.runtime.jetstream_blobs import CHUNK_BYTES, JetStreamBlobStore
from beamline.runtime.memory_blobs import MemoryBlobStore
from beamline.runtime.nats_server import NatsServer
from beamline.runtime.shm_blobs import ShmBlobStore, shm_root, sweep
from brokers import SUBJECTS, NatsBroker


@pytest_asyncio.fixture(params=["shm", "jetstream", "memory"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[BlobStore]:
    match request.param:
        case "memory":
            yield MemoryBlobStore()
        case "shm":
            yield ShmBlobStore(shm_root(SUBJECTS, tmp_path))
            sweep(SUBJECTS, tmp_path)
        case _:
            server = NatsServer(tmp_path, SUBJECTS, blobs=True)
            await server.start()
            broker = NatsBroker(server)
            bus = await broker.client("coordinator")
            await bus.ensure_streams(blobs=True)
            yield JetStreamBlobStore(bus.connection, SUBJECTS)
            await broker.close()


@pytest.mark.parametrize("num_bytes", [0, 1, CHUNK_BYTES, 20 * CHUNK_BYTES + 17])
async def test_what_is_got_is_what_was_put(store: BlobStore, num_bytes: int) -> None:
    payload = os.urandom(num_bytes)
    ref = await store.put("group-1", "trajectories", payload)
    assert (ref.owner, ref.kind, ref.num_bytes) == ("group-1", "trajectories", num_bytes)
    assert bytes(await store.get(ref)) == payload


async def test_two_writers_of_one_group_do_not_meet(store: BlobStore) -> None:
    refs = [await store.put("group-1", "trajectories", bytes([index])) for index in range(2)]
    assert [bytes(await store.get(ref)) for ref in refs] == [b"\0", b"\1"]


async def test_release_drops_an_owner_and_no_other(store: BlobStore) -> None:
    gone, kept = await store.put("group-1", "trajectories", b"one"), await store.put("group-2", "trajectories", b"two")
    view = await store.get(gone)
    await store.release("group-1")
    await store.release("group-1")
    with pytest.raises(BlobError, match=rf"blob group-1/{gone.key} of 3 bytes is not there"):
        await store.get(gone)
    assert bytes(view) == b"one", "views already handed out stay valid"
    assert bytes(await store.get(kept)) == b"two"


async def test_a_wrong_size_or_checksum_is_named(store: BlobStore) -> None:
    ref = await store.put("group-1", "trajectories", b"payload")
    with pytest.raises(BlobError, match=rf"group-1/{ref.key} has 7 bytes, expected 8"):
        await store.get(msgspec.structs.replace(ref, num_bytes=8))
    with pytest.raises(BlobError, match=rf"checksum {ref.checksum}, expected 0000"):
        await store.get(msgspec.structs.replace(ref, checksum="0" * 16))


@pytest.mark.parametrize("name", ["", "..", "a/b", "a.b", "a b", ">", "*"])
async def test_names_that_could_lead_elsewhere_are_refused(store: BlobStore, name: str) -> None:
    with pytest.raises(BlobError, match="owner"):
        await store.put(name, "trajectories", b"")
    with pytest.raises(BlobError, match="owner"):
        await store.release(name)
    if not isinstance(store, MemoryBlobStore):
        ref = await store.put("group-1", "trajectories", b"x")
        with pytest.raises(BlobError, match="key"):
            await store.get(msgspec.structs.replace(ref, key=name))


async def test_a_lost_chunk_is_named(nats: NatsBroker) -> None:
    bus = await nats.client("coordinator")
    store = JetStreamBlobStore(bus.connection, SUBJECTS)
    ref = await store.put("group-1", "trajectories", os.urandom(3 * CHUNK_BYTES))
    short = msgspec.structs.replace(ref, num_bytes=4 * CHUNK_BYTES + 5)
    with pytest.raises(BlobError, match=rf"group-1/{ref.key} lacks chunks 3, 4 of 5"):
        await store.get(short)


async def test_another_service_reads_but_does_not_release(nats: NatsBroker) -> None:
    rollout, reward = await nats.client("rollout"), await nats.client("reward")
    payload = os.urandom(3 * CHUNK_BYTES)
    ref = await JetStreamBlobStore(rollout.connection, SUBJECTS).put("group-1", "trajectories", payload)
    reader = JetStreamBlobStore(reward.connection, SUBJECTS)
    assert bytes(await reader.get(ref)) == payload
    with pytest.raises(PermissionDenied, match=r"(?i)stream\.purge"):
        await reader.release("group-1")


async def test_shared_memory_is_private_and_swept(tmp_path: Path) -> None:
    root = shm_root(SUBJECTS, tmp_path)
    store = ShmBlobStore(root)
    ref = await store.put("group-1", "trajectories", b"x" * 100)
    assert root.stat().st_mode & 0o777 == 0o700
    assert (root / "group-1").stat().st_mode & 0o777 == 0o700
    assert (root / "group-1" / ref.key).stat().st_mode & 0o777 == 0o600
    assert shm_root(SUBJECTS, tmp_path / "other") != root
    assert sweep(SUBJECTS, tmp_path) == 100
    assert not root.exists()
    assert sweep(SUBJECTS, tmp_path) == 0


async def test_a_full_store_says_what_is_needed_and_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file opened is /dev/full, whose every write the kernel refuses for want of space."""
    root = tmp_path / "store"
    store = ShmBlobStore(root)
    real_open = os.open

    def open_full(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT and root in Path(path).parents:
            return real_open("/dev/full", os.O_WRONLY)
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", open_full)
    with pytest.raises(BlobError, match=r"shared memory is full: blob group-1/\S+ needs 1000 bytes, \S+ has \d+ free"):
        await store.put("group-1", "trajectories", bytes(1000))
    assert list((root / "group-1").iterdir()) == []


async def test_usage_is_what_all_blobs_take(store: BlobStore) -> None:
    assert (await store.usage()).used_bytes == 0
    await store.put("group-1", "trajectories", b"x" * 1000)
    await store.put("group-2", "trajectories", b"y" * 500)
    used = (await store.usage()).used_bytes
    assert 1500 <= used < 3000, "the broker counts headers too"
    await store.release("group-1")
    usage = await store.usage()
    assert 500 <= usage.used_bytes < used - 900
    assert usage.free_bytes is None or usage.free_bytes > 0
