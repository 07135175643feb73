"""The draw of a step's groups: what is useful is bound to the step, what is not ends as filtered."""

from collections.abc import Awaitable, Callable

from beamline.coordinator import journal as j
from beamline.coordinator.core import Core
from beamline.coordinator.ledger import BatchPlan
from beamline.protocol.errors import BeamlineError
from beamline.protocol.messages import ScoredGroup

MAX_EMPTY_BATCHES = 20
"""So many batches' worth of groups without one of use end the run: there is nothing left to learn from."""

type NextPlan = Callable[[], Awaitable[BatchPlan]]
"""Waits until the ledger has a plan."""


class Drawing:
    """Fills the batch of the step under way."""

    def __init__(self, core: Core, next_plan: NextPlan) -> None:
        self._core = core
        self._next_plan = next_plan

    async def fill(self) -> list[ScoredGroup]:
        """Take plans until one binds groups to the step. Returns all groups that were drawn for it.

        After a restart with a batch that was bound before, these are the bound ones alone.

        Raises:
            BeamlineError: nothing of use in `MAX_EMPTY_BATCHES` batches, or in as many as dynamic sampling may draw.
        """
        ledger = self._core.ledger
        drawn = ledger.batch(ledger.pending_step or 0)
        while ledger.pending_step is None:
            plan = await self._next_plan()
            drawn += plan.groups
            await self._bind(plan)
            self._check(plan.step)
        return drawn

    async def _bind(self, plan: BatchPlan) -> None:
        """Journal which groups the step trains, filters and finds stale."""
        kept, filtered = self._core.batcher.split(plan.groups)
        await self._core.commit(j.Batched(step=plan.step, kept=kept, filtered=filtered, stale=plan.stale))
        await self._core.release(filtered + plan.stale)

    def _check(self, step: int) -> None:
        config = self._core.config
        num_batches = max(MAX_EMPTY_BATCHES, config.algorithm.dynamic_sampling.max_sample_batches)
        num_kept, num_filtered = self._core.ledger.num_drawn(step)
        if not num_kept and num_filtered >= num_batches * config.rollout.sampling.groups_per_step:
            raise BeamlineError(
                f"step {step}: {num_filtered} groups, {num_batches} batches, and none of use: their rewards do not "
                "differ, or none of their responses came to an end; the task is solved, or out of reach. Change "
                "data.train, or set algorithm.drop_zero_variance=false and algorithm.dynamic_sampling.mode=none"
            )
