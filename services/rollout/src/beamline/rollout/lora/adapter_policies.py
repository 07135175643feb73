"""Policies that are adapters on a model that stays: staged beside what is served, and served by naming another slot."""

import asyncio
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm.lora.request import LoRARequest

from beamline.protocol.adapter import adapter_shapes, adapters_of
from beamline.rollout import checkpoint
from beamline.rollout.engine import Pause, Scored
from beamline.rollout.lora.budget import SlotPlan
from beamline.rollout.lora.versions import AdapterVersions
from beamline.rollout.ranks import Ranks
from beamline.rollout.weight_check import ADAPTERS, check_manifest
from beamline.weights.manifest import WeightManifest
from beamline.weights.tensors import ITEM_BYTES, num_bytes

log = logging.getLogger(__name__)

_MIB = 1 << 20
_PATH = "memory"
"""For vLLM, which wants one: no file is read."""


class AdapterPolicies:
    """Implements `Policies`.

    A staged version has an id of its own at once, so that its canary is scored before anybody else reads it. Served to
    all, every id reads its slot from then on; served beside the one before, requests that come are given its id, of
    which the ranks need not hear.

    Args:
        ranks: of the engine.
        model_path: of the model.
        dtype: in which it is held.
        slots: for adapters.
        policy_version: of the model without any, which is served first.
    """

    def __init__(self, ranks: Ranks, model_path: Path, dtype: str, slots: SlotPlan, policy_version: int) -> None:
        shapes, shape = checkpoint.tensor_shapes(model_path), checkpoint.routing_shape(model_path)
        self._ranks = ranks
        self._shapes = adapter_shapes(adapters_of(shapes, slots.section, shape.top_k if shape else 0))
        self._versions = AdapterVersions(slots.num_slots, policy_version)
        self._model_bytes = sum(map(math.prod, shapes.values())) * ITEM_BYTES[dtype]
        self._has_ended = asyncio.Event()
        """Set whenever a request has."""

    @property
    def is_staged(self) -> bool:
        return self._versions.staged is not None

    async def begin(self) -> None:
        """Tell the ranks what is served before the first version has come."""
        await self._bind()

    async def stage(self, manifest: WeightManifest, slot_wait_s: float) -> int:
        self._versions.drop()
        await asyncio.to_thread(check_manifest, manifest, self._shapes, ADAPTERS)
        version, weights, num_fetched = manifest.policy_version, manifest.contents, 0
        slot = self._versions.find(version, weights)
        if slot is None:
            slot = await self._room(version, slot_wait_s)
            num_fetched = await self._ranks.stage(manifest.encode(), slot)
            self._log(manifest)
        self._versions.stage(slot, version, weights)
        await self._bind()
        return num_fetched

    async def drop(self) -> None:
        self._versions.drop()
        await self._ranks.call("beamline_drop")

    def needs_pause(self, pause: Pause) -> bool:
        return pause != "overlap" and self._versions.is_new

    async def activate(self, pause: Pause) -> None:
        if pause == "overlap":
            self._versions.serve_beside()
        else:
            self._versions.rebind()
            await self._bind()

    @contextmanager
    def read(self, policy: Scored) -> Iterator[LoRARequest | None]:
        if policy == "base":
            yield None
            return
        id = self._versions.staged if policy == "staged" else self._versions.served
        assert id is not None, "no policy is staged"
        self._versions.begin(id)
        try:
            yield LoRARequest(lora_name=f"adapters-{id}", lora_int_id=id, lora_path=_PATH)
        finally:
            self._versions.end(id)
            self._has_ended.set()

    async def _room(self, policy_version: int, wait_s: float) -> int:
        """A slot to load into, once requests have left one. Raises WeightError."""
        try:
            async with asyncio.timeout(wait_s):
                while (slot := self._versions.make_room()) is None:
                    self._has_ended.clear()
                    await self._has_ended.wait()
        except TimeoutError:
            raise self._versions.full(policy_version) from None
        return slot

    async def _bind(self) -> None:
        """Have every rank know what each id stands for, all with the same step."""
        await self._ranks.call("beamline_bind", [list(binding) for binding in self._versions.bindings])

    def _log(self, manifest: WeightManifest) -> None:
        size = sum(num_bytes(tensor.dtype, tensor.shape) for tensor in manifest.tensors)
        log.info(
            "policy %d: adapters %.1f MiB of the full model's %.1f MiB (%.1f %%)",
            *(manifest.policy_version, size / _MIB, self._model_bytes / _MIB, 100 * size / self._model_bytes),
        )
