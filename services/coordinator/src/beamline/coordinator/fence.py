"""Takes policies through the rollout workers: all prepare one, then the fence opens and they activate it together."""

import logging
import time

from beamline.coordinator.core import Core
from beamline.coordinator.passage import WORDS, Passage
from beamline.coordinator.roster import Stage
from beamline.protocol.errors import BeamlineError, DeadlineExceeded
from beamline.protocol.messages import Fence

log = logging.getLogger(__name__)

GRACE = 1.1
"""A worker ends its own try at `weights.deadline_s` and says why; its answer has a tenth longer to arrive."""


class FenceKeeper:
    """Consumes PolicyPrepared and PolicyLoaded by way of the roster, produces fences; one policy at a time."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._last: Fence | None = None

    async def let_through(self, policy_version: int) -> None:
        """Returns when every worker that is waited for serves the policy, or is left out of it with its reason.

        Repeatable: what an earlier process of the coordinator has begun goes on where it was. Returns early for a
        policy that the trainer has replaced meanwhile: who starts now hears of the newest alone.

        Raises:
            BeamlineError: no worker could prepare it, or none could load it; with each one's reason.
            DeadlineExceeded: no worker was there within `coordinator.step_deadline_s`.
        """
        passage, is_open = await self._begin(policy_version)
        for goal in (Stage.SERVED,) if is_open else (Stage.PREPARED, Stage.SERVED):
            await self._gather(passage, goal)
            if self._is_replaced(passage):
                return
        for worker, reason in passage.left_out().items():
            self._core.roster.leave_out(worker, policy_version, reason)
            log.error("the run goes on without %s, policy %d: %s", worker, policy_version, reason)

    async def _begin(self, policy_version: int) -> tuple[Passage, bool]:
        """The policy's passage, and whether its fence is open already.

        A policy's update itself asks for the first attempt. What was answered to an earlier process went with it: a
        fence of a further attempt asks for the answers once more, which costs who has prepared it nothing.
        """
        is_first = self._last is None
        kept = self._last or await self._core.bus.last(Fence)
        is_open, attempt = False, 2 if is_first and self._core.state.boots > 1 else 1
        if kept is not None and kept.policy_version == policy_version:
            is_open, attempt = kept.is_open, kept.attempt + 1
        max_tries = self._core.config.weights.attempts
        passage = Passage(self._core.roster, policy_version, max_tries=max_tries, attempt=attempt, now=time.monotonic)
        return passage, is_open

    async def _gather(self, passage: Passage, goal: Stage) -> None:
        """Ask until every worker that is waited for has come to the goal, or has no try left."""
        if goal is Stage.SERVED or passage.attempt > 1:
            await self._ask(passage, goal)
        await self._answers(passage, goal)
        while not self._is_replaced(passage) and passage.retry():
            await self._ask(passage, goal)
            await self._answers(passage, goal)
        if not passage.reached(goal) and not self._is_replaced(passage):
            version, reasons = passage.policy_version, passage.left_out()
            raise BeamlineError(f"no rollout worker could {WORDS[goal]} policy {version}: {reasons}")

    async def _ask(self, passage: Passage, goal: Stage) -> None:
        self._last = Fence(policy_version=passage.policy_version, attempt=passage.attempt, is_open=goal is Stage.SERVED)
        await self._core.bus.publish(self._last)

    async def _answers(self, passage: Passage, goal: Stage) -> None:
        """Wait for those that had started, and longer only where nobody else can come through."""
        deadline_s = self._core.config.weights.deadline_s
        try:
            await self._until_decided(passage, goal, GRACE * deadline_s)
        except DeadlineExceeded as late:
            log.warning("%s", late)
            passage.give_up(goal, deadline_s)
            await self._until_decided(passage, goal, self._core.config.coordinator.step_deadline_s)

    async def _until_decided(self, passage: Passage, goal: Stage, deadline_s: float) -> None:
        await self._core.pulse.when(
            lambda: self._is_replaced(passage) or not passage.awaited(goal),
            lambda: f"{', '.join(passage.awaited(goal))} to {WORDS[goal]} policy {passage.policy_version}",
            deadline_s,
            on=lambda: passage.awaited(goal),
        )

    def _is_replaced(self, passage: Passage) -> bool:
        return self._core.update is not None and self._core.update.policy_version > passage.policy_version
