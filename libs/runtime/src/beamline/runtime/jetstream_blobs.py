"""`BlobStore` over the bus, for services on different hosts: chunks in a JetStream stream, pulled a few at a time."""

import asyncio

from nats.aio.msg import Msg
from nats.js import api

from beamline.protocol.errors import BlobError, DeadlineExceeded
from beamline.protocol.messages import BlobRef
from beamline.protocol.subjects import Subjects
from beamline.runtime.blob_ref import check_names, check_owner, make_ref, missing, verify
from beamline.runtime.blob_store import BlobUsage
from beamline.runtime.deadline import deadline
from beamline.runtime.nats_connection import NatsConnection
from beamline.runtime.nats_pull import PullRequest
from beamline.runtime.waits import BROKER

CHUNK_BYTES = 1024 * 1024
"""JetStream slows down with larger messages."""

_CHUNKS_IN_FLIGHT = 8
_CHUNK = "Beamline-Chunk"
_DEADLINE_S = 60.0
_INACTIVE_S = 15.0


class JetStreamBlobStore:
    """A blob's chunks are messages of the subject `blob.<owner>.<key>`, numbered in a header."""

    def __init__(self, connection: NatsConnection, subjects: Subjects) -> None:
        self._connection = connection
        self._subjects = subjects
        self._stream = subjects.stream("blob")

    async def put(self, owner: str, kind: str, payload: bytes | memoryview) -> BlobRef:
        ref = make_ref(owner, kind, payload)
        columns = memoryview(payload).cast("B")
        room = asyncio.Semaphore(_CHUNKS_IN_FLIGHT)

        async def put_chunk(index: int) -> None:
            async with room:
                await self._put_chunk(ref, index, bytes(columns[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]))

        await asyncio.gather(*(put_chunk(index) for index in range(_num_chunks(ref))))
        return ref

    async def get(self, ref: BlobRef) -> memoryview:
        check_names(ref)
        try:
            async with deadline(_DEADLINE_S, f"the chunks of blob {ref.owner}/{ref.key}", on=BROKER):
                while (chunks := await self._fetch(ref)) is None:
                    pass
        except DeadlineExceeded:
            raise BlobError(f"blob {ref.owner}/{ref.key}: its chunks did not arrive within {_DEADLINE_S:g} s") from None
        lost = [str(index) for index in range(_num_chunks(ref)) if index not in chunks]
        if lost:
            raise BlobError(f"blob {ref.owner}/{ref.key} lacks chunks {', '.join(lost)} of {_num_chunks(ref)}")
        payload = b"".join(chunks[index] for index in sorted(chunks))
        verify(ref, payload)
        return memoryview(payload)

    async def release(self, owner: str) -> None:
        check_owner(owner)

        async def purge() -> bool:
            return await self._connection.jetstream.purge_stream(self._stream, subject=self._subjects.blob(owner))

        call = f"$JS.API.STREAM.PURGE.{self._stream}"
        await self._connection.ask(f"the blobs of {owner} to be dropped", call, purge, _DEADLINE_S)

    async def usage(self) -> BlobUsage:
        async def get() -> api.StreamInfo:
            return await self._connection.jetstream.stream_info(self._stream)

        call = f"$JS.API.STREAM.INFO.{self._stream}"
        info = await self._connection.ask("the size of the blobs", call, get, _DEADLINE_S)
        return BlobUsage(used_bytes=info.state.bytes)

    async def close(self) -> None:
        """The connection belongs to the bus."""

    async def _put_chunk(self, ref: BlobRef, index: int, chunk: bytes) -> None:
        subject = self._subjects.blob(ref.owner, ref.key)
        headers = {api.Header.MSG_ID.value: f"{ref.owner}/{ref.key}/{index}", _CHUNK: str(index)}

        async def attempt() -> api.PubAck:
            return await self._connection.jetstream.publish(subject, chunk, headers=dict(headers))

        await self._connection.ask(f"chunk {index} of {subject} to be stored", subject, attempt, _DEADLINE_S)

    async def _fetch(self, ref: BlobRef) -> dict[int, bytes] | None:
        """All chunks that the stream holds by index; None when the connection was lost on the way."""
        subject = self._subjects.blob(ref.owner, ref.key)
        config = api.ConsumerConfig(
            name=self._connection.client.new_inbox().rpartition(".")[2],
            filter_subject=subject,
            ack_policy=api.AckPolicy.NONE,
            inactive_threshold=_INACTIVE_S,
            mem_storage=True,
        )

        async def create() -> api.ConsumerInfo:
            return await self._connection.jetstream.add_consumer(self._stream, config)

        call = f"$JS.API.CONSUMER.CREATE.{self._stream}.{config.name}.{subject}"
        num_stored = (await self._connection.ask(f"a reader of {subject}", call, create, _DEADLINE_S)).num_pending or 0
        if num_stored == 0 and ref.num_bytes:
            raise missing(ref)
        chunks: dict[int, bytes] = {}
        pull = PullRequest(self._connection, self._stream, str(config.name))
        try:
            for num_left in range(num_stored, 0, -1):
                msg = await pull.next(min(_CHUNKS_IN_FLIGHT, num_left))
                if not isinstance(msg, Msg):
                    return None
                chunks[int((msg.headers or {})[_CHUNK])] = msg.data
        finally:
            await pull.close()
        return chunks


def _num_chunks(ref: BlobRef) -> int:
    return -(-ref.num_bytes // CHUNK_BYTES)
