"""Weights over NIXL: registered memory that readers fetch from, on this host or another, without the owner's help.

The owner registers its memory once and says in the manifest where it lies; a reader posts one READ of as many
descriptors as it needs. NIXL says of a peer that dies in the middle of a transfer that the transfer is done, and an
owner may write the next policy but one under a slow reader: what was read counts only once its checksums fit.

Only this file imports NIXL. Its own serialised descriptors are pickles, and are not used.
"""

import itertools
import mmap
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from nixl_cu13._api import nixl_agent, nixl_agent_config

from beamline.protocol.errors import WeightError
from beamline.weights.manifest import NixlPlace, TensorEntry, WeightManifest
from beamline.weights.segment import HeapSegment
from beamline.weights.tensors import NamedTensor, verify, write

TRANSFER_DEADLINE_S = 300.0
POLL_S = 0.0005
"""NIXL has no way to wait for a transfer but to ask."""
MAX_DESCRIPTOR_BYTES = 64 << 20
"""A longer range is read in several, which UCX moves side by side."""
_MEMORY = "DRAM"
_numbers = itertools.count()


def _agent(role: str) -> Any:
    """An agent of its own name: NIXL refuses to meet the same one twice."""
    name = f"beamline-{role}-{os.uname().nodename}-{os.getpid()}-{next(_numbers)}"
    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


class NixlExporter:
    """The owner's side: two segments by turns, each registered when it is first full."""

    def __init__(self) -> None:
        self._agent = _agent("owner")
        self._segments = [HeapSegment(), HeapSegment()]
        self._registered: dict[HeapSegment, Any] = {}

    def export(self, policy_version: int, tensors: Iterable[NamedTensor]) -> WeightManifest:
        """Copy a policy's tensors as they come, over those of the policy before the last.

        Raises WeightError: memory is full, or a buffer does not have the size that its dtype and shape ask for.
        """
        segment = self._segments[0]
        segment.restart()
        entries = [write(segment, tensor) for tensor in tensors]
        segment.seal()
        if segment not in self._registered:
            regions = [(segment.address, max(segment.num_bytes, 1), 0, "")]
            self._registered[segment] = self._agent.register_memory(regions, _MEMORY)
        self._segments.reverse()
        return WeightManifest(
            policy_version=policy_version,
            place=NixlPlace(agent=self._agent.name, metadata=self._agent.get_agent_metadata(), address=segment.address),
            num_bytes=segment.num_bytes,
            tensors=entries,
        )

    def close(self) -> None:
        """Let go of the memory; a reader that still fetches fails or finds wrong checksums."""
        for registered in self._registered.values():
            self._agent.deregister_memory(registered)
        self._registered = {}
        for segment in self._segments:
            segment.close()


class NixlReader:
    """Fetches policies into memory of its own, registered once; holds one policy at a time."""

    def __init__(self) -> None:
        self._agent = _agent("reader")
        self._owners: dict[str, bytes] = {}
        """Agents that it has met, and what they said of their memory then."""
        self._registered: Any = None
        self._bytes = np.empty(0, np.uint8)
        self.manifest: WeightManifest | None = None

    def fetch(self, manifest: WeightManifest, ranges: Sequence[tuple[int, int]] | None = None) -> None:
        """Read a policy, or only these ranges of it, (offset, number of bytes) each.

        Raises:
            WeightError: the owner cannot be reached, or did not deliver within the deadline.
        """
        place = manifest.place
        assert isinstance(place, NixlPlace)
        self._make_room(manifest.num_bytes)
        wanted = list(_split(ranges if ranges is not None else [(0, manifest.num_bytes)]))
        here = self._bytes.ctypes.data
        try:
            if self._owners.get(place.agent) != place.metadata:
                self._agent.add_remote_agent(place.metadata)
                self._owners[place.agent] = place.metadata
            local = self._agent.get_xfer_descs([(here + o, n, 0) for o, n in wanted], _MEMORY)
            remote = self._agent.get_xfer_descs([(place.address + o, n, place.device) for o, n in wanted], _MEMORY)
            self._transfer(self._agent.initialize_xfer("READ", local, remote, place.agent), manifest)
        except WeightError:
            raise
        except Exception as error:  # the library's exceptions have no common base
            self._forget(place.agent)
            raise WeightError(
                f"policy {manifest.policy_version}: cannot read its weights from {place.agent}: {error}"
            ) from error
        self.manifest = manifest

    def tensors(self) -> Iterator[tuple[TensorEntry, memoryview]]:
        """Each tensor with its bytes, in the manifest's order; overwritten by the next fetch."""
        assert self.manifest is not None, "nothing was fetched"
        for entry in self.manifest.tensors:
            yield entry, memoryview(self._bytes)[entry.offset : entry.offset + entry.num_bytes].toreadonly()

    def verify(self) -> None:
        """Check every checksum, before any tensor is used. Raises WeightError naming the first that differs."""
        assert self.manifest is not None, "nothing was fetched"
        verify(self.manifest.policy_version, self.tensors())

    def close(self) -> None:
        if self._registered is not None:
            self._agent.deregister_memory(self._registered)
            self._registered = None

    def _make_room(self, num_bytes: int) -> None:
        if len(self._bytes) >= max(num_bytes, 1):
            return
        self.close()
        memory = mmap.mmap(-1, max(num_bytes, 1))
        memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(memory, np.uint8)
        regions = [(self._bytes.ctypes.data, len(self._bytes), 0, "")]
        self._registered = self._agent.register_memory(regions, _MEMORY)

    def _transfer(self, handle: Any, manifest: WeightManifest) -> None:
        ends = time.monotonic() + TRANSFER_DEADLINE_S
        state = self._agent.transfer(handle)
        while state == "PROC" and time.monotonic() < ends:
            time.sleep(POLL_S)
            state = self._agent.check_xfer_state(handle)
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            what = f"nothing more came within {TRANSFER_DEADLINE_S:g} s" if state == "PROC" else "the transfer failed"
            raise WeightError(f"policy {manifest.policy_version}: reading its weights over NIXL: {what}")

    def _forget(self, agent: str) -> None:
        if self._owners.pop(agent, None):
            self._agent.remove_remote_agent(agent)


def _split(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for offset, num_bytes in ranges:
        for start in range(0, num_bytes, MAX_DESCRIPTOR_BYTES):
            yield offset + start, min(MAX_DESCRIPTOR_BYTES, num_bytes - start)
