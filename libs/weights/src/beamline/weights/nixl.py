"""Weights over NIXL: registered memory that readers fetch from, on this host or another, without the owner's help.

The owner registers its memory once and says in the manifest where it lies; a reader posts one READ of as many
descriptors as it needs. NIXL may say of a peer that dies in the middle of a transfer that the transfer is done, and an
owner may write the next policy but one under a slow reader: what was read counts only once its checksums fit.

A transfer that was given up may still go on, and nothing but the end of its agent stops it. So a reader that gave one
up goes on with another agent, and the memory of the old one stays for as long as that lives.

Only this file imports NIXL. Its own serialised descriptors are pickles, and are not used.
"""

import bisect
import logging
import mmap
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from beamline.protocol.errors import ConfigError, WeightError
from beamline.weights.manifest import NixlPlace, Place, WeightManifest
from beamline.weights.segment import ALIGNMENT_BYTES, HeapSegment, write
from beamline.weights.tensors import Shard
from beamline.weights.transport import Range

try:
    from nixl_cu13 import _bindings  # pyright: ignore[reportAttributeAccessIssue]
    from nixl_cu13._api import nixl_agent, nixl_agent_config
except ImportError as error:
    raise ConfigError(f"the nixl transport needs the package nixl-cu13, which does not load: {error}") from error

TRANSFER_DEADLINE_S = 60.0
"""For one fill."""
POLL_S = 0.0005
"""NIXL has no way to wait for a transfer but to ask."""
MAX_DESCRIPTOR_BYTES = 64 << 20
"""A longer range is read in several."""
KEPT_POLICIES = 2
"""Memory that was not needed for more policies than these is given back."""
NETWORK = "NET_DEVICES=lo"
"""UCX listens on every network of the host if not told otherwise. UCX_NET_DEVICES in the environment overrides it."""

type Block = tuple[int, int, int]
"""Offset in a place, where it goes to in this process, and number of bytes."""

_MEMORY = "DRAM"
_BACKEND = "UCX"
_ERRORS = tuple(
    kind for kind in vars(_bindings).values() if isinstance(kind, type) and issubclass(kind, Exception)
)  # they have no base of their own


def _agent(role: str) -> Any:
    """An agent of a name of its own, which listens for no metadata. Raises ConfigError: UCX does not start."""
    logging.getLogger("nixl").setLevel(logging.WARNING)
    name = f"beamline-{role}-{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"
    agent = nixl_agent(name, nixl_agent_config(backends=[]))
    try:
        agent.create_backend(_BACKEND, {"engine_config": NETWORK})
    except _ERRORS as error:
        raise ConfigError(
            f"NIXL cannot start UCX ({error}): if set, UCX_TLS must have tcp, and UCX_NET_DEVICES a network that is up"
        ) from error
    return agent


class NixlOwner:
    """Implements `Owner`: two segments by turns, each registered when it is first full. Close it at the end.

    Raises ConfigError: NIXL does not start here.
    """

    def __init__(self) -> None:
        self._agent: Any = _agent("owner")
        self._segments = [HeapSegment(), HeapSegment()]
        """The one that is written next comes first."""
        self._registered: set[HeapSegment] = set()
        self._described: WeightManifest | None = None

    def export(self, policy_version: int, shards: Iterable[Shard]) -> None:
        """Over the policy before the last: a reader that still fetches that one finds wrong checksums."""
        segment = self._segments[0]
        segment.restart()
        entries = write(segment, shards)
        segment.seal()
        if segment not in self._registered:
            self._agent.register_memory([(segment.address, max(segment.num_bytes, 1), 0, "")], _MEMORY)
            self._registered.add(segment)
        self._segments.reverse()
        place = NixlPlace(
            num_bytes=segment.num_bytes,
            agent=self._agent.name,
            metadata=self._agent.get_agent_metadata(),
            address=segment.address,
        )
        self._described = WeightManifest(policy_version=policy_version, places=[place], tensors=entries)

    def describe(self) -> WeightManifest:
        assert self._described is not None, "nothing was exported"
        return self._described

    def close(self) -> None:
        """First the agent goes, which may be sending, then the memory. A reader that still fetches fails."""
        self._agent = None
        for segment in self._segments:
            segment.close()


class NixlReader:
    """Implements `Reader`: fetches into memory of its own, which stays registered for the policies after.

    Args:
        deadline_s: for one fill.

    Raises ConfigError: NIXL does not start here.
    """

    def __init__(self, deadline_s: float = TRANSFER_DEADLINE_S) -> None:
        self._session = _Session()
        self._deadline_s = deadline_s
        self._free: list[_Arena] = []
        self._version: int | None = None
        self._round = 0

    def attach(self, place: Place, policy_version: int) -> "NixlAttached":
        """Raises WeightError: the owner is gone."""
        assert isinstance(place, NixlPlace)
        if policy_version != self._version:
            self._version, self._round = policy_version, self._round + 1
        try:
            self._session.meet(place)
        except (*_ERRORS, _TransferError) as error:
            raise self._lost(place, policy_version, error) from error
        return NixlAttached(self, place, policy_version)

    def close(self) -> None:
        """A second call does nothing."""
        self._free = []
        self._session.close()

    def take(self, num_bytes: int) -> "_Arena":
        """Memory of this size: what policies before have used, where it fits."""
        for old in [arena for arena in self._free if arena.round < self._round - KEPT_POLICIES]:
            self._free.remove(old)
            old.close()
        arena = next((arena for arena in self._free if arena.num_bytes == num_bytes), None)
        if arena is None:
            arena = _Arena(self._session, num_bytes)
        else:
            self._free.remove(arena)
        arena.round = self._round
        return arena

    def give_back(self, arena: "_Arena") -> None:
        """It is not read any more."""
        if arena.session is self._session:
            self._free.append(arena)

    def read(self, place: NixlPlace, policy_version: int, blocks: Sequence[Block]) -> None:
        """Fetch blocks. Raises WeightError: the owner is gone, or late."""
        try:
            self._session.read(place, list(_split(blocks)), self._deadline_s)
        except (*_ERRORS, _TransferError) as error:
            raise self._lost(place, policy_version, error) from error

    def _lost(self, place: NixlPlace, policy_version: int, error: Exception) -> WeightError:
        """What went wrong, with the names. Another session reads from now on."""
        self._free = []
        self._session = _Session()
        return WeightError(f"policy {policy_version}: cannot read its weights from {place.agent}: {error}")


class NixlAttached:
    """Implements `Attached`: a copy of the needed bytes, close together in memory of the reader's."""

    def __init__(self, reader: NixlReader, place: NixlPlace, policy_version: int) -> None:
        self._reader = reader
        self._place = place
        self._policy_version = policy_version
        self._offsets: list[int] = []
        self._starts: list[int] = []
        """Where in the arena the range lies that begins at the offset."""
        self._arena: _Arena | None = None

    def fill(self, ranges: Sequence[Range]) -> None:
        end = 0
        for offset, num_bytes in ranges:
            start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES + offset % ALIGNMENT_BYTES
            self._offsets.append(offset)
            self._starts.append(start)
            end = start + num_bytes
        arena = self._arena = self._reader.take(end)
        here = [arena.address + start for start in self._starts]
        blocks = [(offset, address, size) for (offset, size), address in zip(ranges, here, strict=True)]
        self._reader.read(self._place, self._policy_version, blocks)

    def content(self, offset: int, num_bytes: int) -> memoryview:
        assert self._arena is not None, "not filled"
        index = bisect.bisect_right(self._offsets, offset) - 1
        start = self._starts[index] + offset - self._offsets[index]
        return memoryview(self._arena.content)[start : start + num_bytes].toreadonly()

    def fence(self) -> None:
        if self._arena is not None:
            self._reader.give_back(self._arena)
            self._arena = None


class _TransferError(Exception):
    """What NIXL does not call an error."""


class _Session:
    """A reader's agent, and the memory that it may write to for as long as it lives."""

    def __init__(self) -> None:
        self.agent: Any = _agent("reader")
        self.memory: dict[int, np.ndarray] = {}
        """By address."""
        self._owners: dict[str, bytes] = {}
        """Agents that it has met, and what they said of their memory then."""

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """First the agent, then its memory."""
        self.agent = None
        self.memory = {}

    def meet(self, place: NixlPlace) -> None:
        """Raises _TransferError, or one of NIXL's."""
        if self._owners.get(place.agent) == place.metadata:
            return
        met = self.agent.add_remote_agent(place.metadata).decode(errors="replace")
        if met != place.agent:
            raise _TransferError(f"its metadata are those of {met}")
        self._owners[met] = place.metadata

    def read(self, place: NixlPlace, blocks: Sequence[Block], deadline_s: float) -> None:
        """Raises _TransferError, or one of NIXL's."""
        local = self.agent.get_xfer_descs([(here, size, 0) for _, here, size in blocks], _MEMORY)
        there = [(place.address + offset, size, place.device) for offset, _, size in blocks]
        handle = self.agent.initialize_xfer("READ", local, self.agent.get_xfer_descs(there, _MEMORY), place.agent)
        ends = time.monotonic() + deadline_s
        try:
            state = self.agent.transfer(handle)
            while state == "PROC" and time.monotonic() < ends:
                _pause()
                state = self.agent.check_xfer_state(handle)
            self.agent.release_xfer_handle(handle)
        finally:
            del handle  # an error that is kept would keep it, and it the agent
        if state != "DONE":
            raise _TransferError(f"not all came within {deadline_s:g} s" if state == "PROC" else "the transfer failed")


class _Arena:
    """Registered memory of a session."""

    def __init__(self, session: _Session, num_bytes: int) -> None:
        try:
            memory = mmap.mmap(-1, max(num_bytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise WeightError(f"no memory for {num_bytes} bytes of weights: {error.strerror}") from error
        memory.madvise(mmap.MADV_HUGEPAGE)
        self.content = np.frombuffer(memory, np.uint8)
        self.address: int = self.content.ctypes.data
        self.num_bytes = num_bytes
        self.session = session
        self.round = 0
        """Number of the policy that it was last used for."""
        session.memory[self.address] = self.content
        self._registered = session.agent.register_memory([(self.address, len(self.content), 0, "")], _MEMORY)

    def close(self) -> None:
        """No transfer into it may be under way."""
        self.session.agent.deregister_memory(self._registered)
        del self.session.memory[self.address]


def _pause() -> None:
    threading.Event().wait(POLL_S)


def _split(blocks: Sequence[Block]) -> Iterator[Block]:
    for offset, address, num_bytes in blocks:
        for start in range(0, num_bytes, MAX_DESCRIPTOR_BYTES):
            yield offset + start, address + start, min(MAX_DESCRIPTOR_BYTES, num_bytes - start)
