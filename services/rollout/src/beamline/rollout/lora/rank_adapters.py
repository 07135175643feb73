"""One rank's adapters: fetched, checked and written into a slot that nothing reads, while the rank samples on."""

from collections.abc import Sequence

import torch

from beamline.rollout.lora.finite import check_finite
from beamline.rollout.lora.pinned_memory import PinnedMemory
from beamline.rollout.lora.slots import LoraSlots
from beamline.rollout.rank_weights import RankWeights, tensors_of
from beamline.weights.staging import Staged

NO_POLICY = -1
"""The version of a request without adapters."""


class RankAdapters:
    """What lies in the slots, and what ids stand for.

    Args:
        slots: of the rank's layers.
        fetcher: of what the slots need.
        device: of the slots.
    """

    def __init__(self, slots: LoraSlots, fetcher: RankWeights, device: torch.device) -> None:
        self._slots = slots
        self._fetcher = fetcher
        self._pinned = PinnedMemory(device)
        self._versions = {0: NO_POLICY}
        """By id; vLLM's own for no adapters is 0."""
        self._bound: dict[int, int] = {}
        """Slot by id."""

    def start(self, manifest: bytes, slot: int) -> None:
        """Begin to fetch a version and to write it into the slot. What goes wrong is in the fetcher's answer."""
        self._fetcher.start(manifest, lambda staged: self._write(staged, slot))

    def bind(self, bindings: Sequence[Sequence[int]]) -> None:
        """What every id stands for from the next step on, each a `versions.Binding`; others stand for nothing."""
        wanted = {id: slot for id, slot, _ in bindings}
        for id in self._bound.keys() - wanted.keys():
            self._slots.unbind(id)
        for id, slot in wanted.items():
            if self._bound.get(id) != slot:
                self._slots.bind(id, slot)
        self._bound = wanted
        self._versions = {0: NO_POLICY} | {id: version for id, _, version in bindings}

    def versions_of(self, ids: Sequence[int]) -> list[int]:
        """The policy version of each request, by the id that it has."""
        return [self._versions[id] for id in ids]

    def _write(self, staged: Staged, slot: int) -> None:
        """Raises WeightError: a value is no number. The slot is as it was then."""
        try:
            check_finite(staged)
            num_tensors = len(staged.manifest.tensors)
            with torch.inference_mode(), self._pinned.beside_sampling(staged.num_bytes, num_tensors):
                self._slots.write(slot, self._pinned.through(tensors_of(staged)))
        finally:
            staged.fence()
