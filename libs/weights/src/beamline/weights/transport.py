"""How weights travel: the promises that every transport keeps.

The owner exports a policy and describes where it lies; a reader attaches to it, has the bytes that it needs filled in,
and lets go behind a fence. `shm`, `cuda_ipc`, `nixl` and `checkpoint` implement both sides; `choice` picks one.
"""

from collections.abc import Buffer, Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from beamline.weights.manifest import Place, WeightManifest
from beamline.weights.tensors import Shard

type Range = tuple[int, int]
"""Offset in a place, and number of bytes."""


@runtime_checkable
class DeviceBytes(Protocol):
    """Bytes on a GPU: a read-only array of uint8."""

    @property
    def __cuda_array_interface__(self) -> Any: ...
    def host_parts(self) -> Iterator[np.ndarray]:
        """All of it in main memory, a part at a time."""
        ...


type Content = Buffer | DeviceBytes


class Owner(Protocol):
    """One rank of the trainer: exports its shards of each policy. Calls come from one thread at a time."""

    def export(self, policy_version: int, shards: Iterable[Shard]) -> None:
        """Copy the shards as they come, one at a time. Readers of the policies before are not disturbed.

        Raises:
            WeightError: no room. What was exported before is still there.
        """
        ...

    def describe(self) -> WeightManifest:
        """This rank's part of the policy that was exported last; `manifest.merge` joins the parts of all ranks."""
        ...

    def close(self) -> None:
        """Let go of everything; nothing of it is left. A second call does nothing."""
        ...


class Attached(Protocol):
    """A reader's hold on one place of one policy version."""

    def fill(self, ranges: Sequence[Range]) -> None:
        """Have these bytes, and no others, readable through `content`. Raises WeightError: the owner is gone or late.

        Args:
            ranges: in rising order, none of which overlap.
        """
        ...

    def content(self, offset: int, num_bytes: int) -> Content:
        """Bytes inside one of the ranges, read-only. Valid until `fence`."""
        ...

    def fence(self) -> None:
        """The reader needs the bytes no more: the owner may write there again. A second call does nothing."""
        ...


class Reader(Protocol):
    """One rank of an engine, towards all owners of one kind of transport."""

    def attach(self, place: Place, policy_version: int) -> Attached:
        """Reach a place, and keep it from being written. Raises WeightError: it is gone, or holds another policy."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...
