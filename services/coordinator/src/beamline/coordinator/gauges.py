"""What the coordinator tells live: how far the step has come, the ledger, the workers, the queues and the blobs."""

import asyncio
import logging
import time
from collections.abc import Callable

from beamline.coordinator.core import Core
from beamline.coordinator.evaluator import Evaluator
from beamline.protocol.errors import BeamlineError

log = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
"""How often broker and blob store are asked; nothing tells of their changes."""


class CoordinatorGauges:
    """Present values, under the names of the metric schema.

    Args:
        core: the run's state.
        evaluator: of the run.
        now: clock of the roster, in seconds.
    """

    def __init__(self, core: Core, evaluator: Evaluator, now: Callable[[], float] = time.monotonic) -> None:
        self._core = core
        self._evaluator = evaluator
        self._now = now
        self._looked_up: dict[str, float] = {}

    def read(self) -> dict[str, float]:
        """All of them; those of queues and blobs are a few seconds old."""
        core = self._core
        now = self._now()
        return {
            "progress/step": float(core.ledger.step),
            "progress/num_steps": float(core.last_step),
            **self._groups(),
            **{f"ledger/{name}": float(count) for name, count in core.ledger.counts().items()},
            **{f"workers/silent_s/{worker}": now - heard for worker, heard in core.roster.heard().items()},
            **self._looked_up,
        }

    async def look(self) -> None:
        """Ask broker and blob store again and again, until cancelled. What they do not answer is left out."""
        while True:
            try:
                self._looked_up = await self._look()
            except (BeamlineError, OSError) as error:
                self._looked_up = {}
                log.debug("no depths of queues and blobs: %s", error)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _look(self) -> dict[str, float]:
        depths, blobs = await self._core.bus.queue_depths(LOOK_EVERY_S), await self._core.blobs.usage()
        free = {} if blobs.free_bytes is None else {"blobs/free_bytes": float(blobs.free_bytes)}
        return {
            **{f"queue/pending/{queue}": float(depth.pending) for queue, depth in depths.items()},
            **{f"queue/unacked/{queue}": float(depth.unacked) for queue, depth in depths.items()},
            "blobs/used_bytes": float(blobs.used_bytes),
            **free,
        }

    def _groups(self) -> dict[str, float]:
        """Of the evaluation under way, else of the batch that is gathered."""
        num_scored, num_needed = self._evaluator.progress()
        ledger = self._core.ledger
        if not num_needed and ledger.pending_step is None and ledger.step < self._core.last_step:
            num_scored, num_needed = ledger.num_fresh(), self._core.batcher.groups_per_step
        return {"progress/scored_groups": float(num_scored), "progress/needed_groups": float(num_needed)}
