"""Which version of the adapters lies in which slot, by which ids requests read the slots, and how many requests do.

A request names its adapters by an id for as long as it lives; an id reads one slot. With `rebind` every id reads the
new version from then on. With `serve_beside` requests keep what they began with, and those that come get another id.
A state machine without I/O: what it says is done by `adapter_policies`, on every rank alike.
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from beamline.protocol.errors import WeightError


class Binding(NamedTuple):
    """What an id stands for."""

    id: int
    slot: int
    policy_version: int


@dataclass
class _Content:
    """Of a slot."""

    policy_version: int
    weights: Hashable
    """What makes them the same ones, wherever they came from."""
    was_served: bool = False


class AdapterVersions:
    """The slots of one engine, alike on all its ranks. Version `policy_version`, in slot 0, is served at the start.

    Args:
        num_slots: at least 2.
        policy_version: of the adapters before the first that are loaded: none, all zero.
    """

    def __init__(self, num_slots: int, policy_version: int) -> None:
        self._contents: list[_Content | None] = [None] * num_slots
        self._contents[0] = _Content(policy_version, None)
        self._ids = count(1)
        """None is used twice: by it the engine tells one version's cached prefixes from another's."""
        self.served = next(self._ids)
        """Id for requests that come."""
        self.staged: int | None = None
        """Id of the version that waits to be served."""
        self._slots = {self.served: 0}
        self._num_requests: Counter[int] = Counter()

    @property
    def bindings(self) -> list[Binding]:
        """Of every id that a request has or may get."""
        return [Binding(id, slot, self._content(slot).policy_version) for id, slot in self._slots.items()]

    def begin(self, id: int) -> None:
        """A request reads by this id from here on."""
        assert id in self._slots, f"id {id} stands for nothing"
        self._num_requests[id] += 1

    def end(self, id: int) -> None:
        """One of its requests has ended."""
        self._num_requests[id] -= 1
        self._forget_unused()

    def find(self, policy_version: int, weights: Hashable) -> int | None:
        """The slot that has held this version since it was served, so that it need not be loaded again."""
        for slot, content in enumerate(self._contents):
            if (
                content
                and content.was_served
                and (content.policy_version, content.weights) == (policy_version, weights)
            ):
                return slot
        return None

    def make_room(self) -> int | None:
        """A slot to load a version into, which nothing reads: an empty one, else the oldest's. None if there is none.

        It holds nothing from here on, until `stage`.
        """
        used = set(self._slots.values())
        free = [(self._age(slot), slot) for slot in range(len(self._contents)) if slot not in used]
        if not free:
            return None
        _, slot = min(free)
        self._contents[slot] = None
        return slot

    def full(self, policy_version: int) -> WeightError:
        """Why `make_room` found none for this version, and what to do."""
        held = ", ".join(f"slot {slot} has {self._use_of(slot)}" for slot in range(len(self._contents)))
        return WeightError(
            f"policy {policy_version}: no adapter slot is free: {held}: let those requests end, or raise "
            f"rollout.engine.adapter_slots={len(self._contents)}"
        )

    def stage(self, slot: int, policy_version: int, weights: Hashable) -> None:
        """The slot holds this version, which waits to be served under an id of its own."""
        if self._contents[slot] is None:
            self._contents[slot] = _Content(policy_version, weights)
        ids = [id for id, read in self._slots.items() if read == slot]
        self.staged = ids[0] if ids else next(self._ids)
        self._slots[self.staged] = slot

    def drop(self) -> None:
        """The staged version is not to be served."""
        self.staged = None
        self._forget_unused()

    @property
    def is_new(self) -> bool:
        """Whether the staged version is another than all that requests read."""
        assert self.staged is not None, "nothing is staged"
        return set(self._slots.values()) != {self._slots[self.staged]}

    def rebind(self) -> None:
        """Serve the staged version, to requests under way too: every id reads it."""
        slot = self._take_staged()
        self._slots = dict.fromkeys(self._slots, slot)
        self._forget_unused()

    def serve_beside(self) -> None:
        """Serve the staged version to requests that come; those under way keep what they have."""
        staged = self.staged
        self._take_staged()
        assert staged is not None
        self.served = staged
        self._forget_unused()

    def _take_staged(self) -> int:
        assert self.staged is not None, "nothing is staged"
        slot, self.staged = self._slots[self.staged], None
        self._content(slot).was_served = True
        return slot

    def _forget_unused(self) -> None:
        """Ids by which nothing reads and nothing will."""
        self._num_requests = +self._num_requests
        kept = {self.served, self.staged, *self._num_requests}
        self._slots = {id: slot for id, slot in self._slots.items() if id in kept}

    def _content(self, slot: int) -> _Content:
        content = self._contents[slot]
        assert content is not None, f"slot {slot} is read and holds nothing"
        return content

    def _age(self, slot: int) -> int:
        content = self._contents[slot]
        return content.policy_version if content else -1

    def _use_of(self, slot: int) -> str:
        ids = [id for id, read in self._slots.items() if read == slot]
        num_requests = sum(self._num_requests[id] for id in ids)
        served = ", served" if self.served in ids else ""
        return f"policy {self._content(slot).policy_version} ({num_requests} requests under way{served})"
