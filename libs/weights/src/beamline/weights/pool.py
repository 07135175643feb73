"""An owner's memory for policies, by turns: which policy lies where, and who still reads it.

One segment is filled while another is read, and filled again when it holds no longer the newest policy and nobody reads
it: two in a run that goes well, one more for as long as a reader stays behind.
"""

import threading
from collections.abc import Callable
from typing import Protocol

from beamline.protocol.errors import WeightError


class Refillable(Protocol):
    """Memory for one policy."""

    def restart(self) -> None:
        """Fill it from the front again."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class Pool[S: Refillable]:
    """Segments of one owner. Its methods are called from many threads.

    Args:
        make: a new segment; may raise WeightError.
    """

    def __init__(self, make: Callable[[], S]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._readers: dict[S, int] = {}
        """Of every segment there is, how many read it."""
        self._versions: dict[int, S] = {}

    @property
    def num_readers(self) -> int:
        with self._lock:
            return sum(self._readers.values())

    def take(self) -> S:
        """One to write into, which nobody reads and does not hold the newest policy; what is left over is closed."""
        with self._lock:
            newest = self._versions[max(self._versions)] if self._versions else None
            unread = [s for s, readers in self._readers.items() if not readers and s is not newest]
            self._versions = {v: segment for v, segment in self._versions.items() if segment not in unread}
            for segment in unread[1:]:
                del self._readers[segment]
                segment.close()
            taken = unread[0] if unread else self._make()
            self._readers[taken] = 0
        taken.restart()
        return taken

    def publish(self, policy_version: int, segment: S) -> None:
        """Let readers have it."""
        with self._lock:
            self._versions[policy_version] = segment

    def drop(self, segment: S) -> None:
        """It was not filled to its end."""
        with self._lock:
            del self._readers[segment]
        segment.close()

    def hold(self, policy_version: int) -> S:
        """Keep it from being written until `release`. Raises WeightError for a policy that is not kept."""
        with self._lock:
            segment = self._versions.get(policy_version)
            if segment is None:
                kept = ", ".join(map(str, sorted(self._versions))) or "none"
                raise WeightError(f"the policies that are kept are {kept}")
            self._readers[segment] += 1
            return segment

    def release(self, segment: S) -> None:
        """One reader less."""
        with self._lock:
            self._readers[segment] -= 1

    def close(self) -> None:
        """Let go of all memory; nobody holds any."""
        with self._lock:
            for segment in self._readers:
                segment.close()
            self._readers, self._versions = {}, {}
