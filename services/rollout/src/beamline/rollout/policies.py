"""How an engine holds policies: `WholeWeights` one, as the parameters; `AdapterPolicies` several, as adapters."""

import asyncio
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from vllm.lora.request import LoRARequest

from beamline.rollout.engine import Pause, Scored
from beamline.rollout.ranks import Ranks
from beamline.rollout.weight_check import check_manifest
from beamline.weights.manifest import WeightManifest


class Policies(Protocol):
    """What is served, and what waits to be. Its calls do not overlap, but for `read`."""

    @property
    def is_staged(self) -> bool:
        """Whether a policy waits."""
        ...

    async def stage(self, manifest: WeightManifest, slot_wait_s: float) -> int:
        """As `Engine.stage_weights`; what was staged before is not, whatever becomes of this. Raises WeightError."""
        ...

    async def drop(self) -> None:
        """Let go of what is staged, or half staged."""
        ...

    def needs_pause(self, pause: Pause) -> bool:
        """Whether no token may be sampled while the staged policy is activated."""
        ...

    async def activate(self, pause: Pause) -> None:
        """Serve what is staged."""
        ...

    def read(self, policy: Scored) -> AbstractContextManager[LoRARequest | None]:
        """By which adapters a request is computed; inside, it is under way."""
        ...


class WholeWeights:
    """Implements `Policies`.

    Args:
        ranks: of the engine.
        shapes: of the model's tensors, by name.
    """

    def __init__(self, ranks: Ranks, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._ranks = ranks
        self._shapes = shapes
        self.is_staged = False

    async def stage(self, manifest: WeightManifest, slot_wait_s: float) -> int:
        self.is_staged = False
        await asyncio.to_thread(check_manifest, manifest, self._shapes)
        num_bytes = await self._ranks.stage(manifest.encode())
        self.is_staged = True
        return num_bytes

    async def drop(self) -> None:
        self.is_staged = False
        await self._ranks.call("beamline_drop")

    def needs_pause(self, pause: Pause) -> bool:
        assert pause != "overlap", "the configuration asks for adapters with it"
        return True

    async def activate(self, pause: Pause) -> None:
        self.is_staged = False
        await self._ranks.call("beamline_activate")

    def read(self, policy: Scored) -> AbstractContextManager[None]:
        assert policy == "served", f"policy {policy!r} is one of adapters"
        return nullcontext()
