"""Ids of root spans that are known beforehand: a process that is started again goes on with the same trace."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b
from typing import NamedTuple

from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator


class RootIds(NamedTuple):
    """Of a trace and of its root."""

    trace_id: int
    span_id: int

    @classmethod
    def of(cls, *parts: object) -> "RootIds":
        """The same ones for the same parts, wherever and whenever."""
        digest = blake2b("\0".join(map(str, parts)).encode(), digest_size=24).digest()
        return cls(int.from_bytes(digest[:16]), int.from_bytes(digest[16:]))


_given: ContextVar[RootIds | None] = ContextVar("root ids", default=None)


@contextmanager
def given_ids(ids: RootIds) -> Iterator[None]:
    """The root span that is started in the block gets these ids. One span a block."""
    token = _given.set(ids)
    try:
        yield
    finally:
        _given.reset(token)


class GivenIds(IdGenerator):
    """Ids at random, but for roots whose ids are given."""

    def __init__(self) -> None:
        self._random = RandomIdGenerator()

    def generate_trace_id(self) -> int:
        given = _given.get()
        return given.trace_id if given else self._random.generate_trace_id()

    def generate_span_id(self) -> int:
        given = _given.get()
        return given.span_id if given else self._random.generate_span_id()
