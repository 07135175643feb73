"""The loops that issue prompts while the ledger has room, and again when an attempt's deadline has passed."""

import asyncio
import time

import msgspec

from beamline.coordinator import journal as j
from beamline.coordinator.core import Core
from beamline.coordinator.cursor import DataCursor, Prompt
from beamline.coordinator.lease import Lease
from beamline.coordinator.seeds import sample_seed
from beamline.protocol.messages import GroupFailed, PromptGroup, Purpose, Sampling, Task
from beamline.runtime.trace_context import TRACEPARENT, continuing


class Admission:
    """Issues training groups. Consumes prompts and room in the ledger, waits for the generate phase; an update, an end
    of a group or a new phase unblocks it."""

    def __init__(self, core: Core, cursor: DataCursor, lease: Lease) -> None:
        self._core = core
        self.cursor = cursor
        self._lease = lease

    async def republish(self) -> None:
        """After a restart: send again what is unanswered; the broker drops what it still has."""
        for prompt in self._core.ledger.unanswered():
            with continuing({TRACEPARENT: prompt.traceparent}):
                await self._core.bus.publish(prompt)

    async def admit(self) -> None:
        """Issue groups for ever."""
        while True:
            room = await self._core.pulse.until(self._room)
            for _ in range(room):
                await self.issue_next()

    async def issue_next(self) -> None:
        """Draw the next prompt and issue it: journaled, then published."""
        number = self._core.ledger.counts()["issued"]
        prompt, position = self.cursor.draw(self._core.state.position)
        await self._issue(self._group(f"g-{number:06d}", prompt), position)

    def data_metrics(self) -> dict[str, float]:
        """Where the data cursor stands."""
        state = self._core.state
        return {
            "data/epoch": self.cursor.epoch(state.position),
            "data/position": float(state.position),
            "data/dropped_prompts": float(state.num_dropped),
        }

    async def expire(self) -> None:
        """Fail attempts that nobody answered by their deadline, for ever."""
        while True:
            await asyncio.sleep(self._core.config.rollout.group_deadline_s / 4)
            for prompt in self._core.ledger.overdue(time.time()):
                await self.fail(_expired(prompt))

    async def fail(self, failed: GroupFailed) -> None:
        """Take a failed attempt: the group is tried again or ends as failed."""
        await self._core.commit(j.Failed(failed=failed))
        for prompt in self._core.ledger.unanswered():
            if prompt.group_id == failed.group_id and prompt.attempt > failed.attempt:
                retry = msgspec.structs.replace(prompt, deadline=self._deadline())
                await self._issue(retry, self._core.state.position)
                return
        if self._core.ledger.end_of(failed.group_id) is not None:
            await self._core.release([failed.group_id])

    async def _issue(self, group: PromptGroup, position: int) -> None:
        with self._core.traces.admit(group.group_id, group.attempt) as traceparent:
            group = msgspec.structs.replace(group, traceparent=traceparent)
            await self._core.commit(j.Issued(prompt=group, position=position))
            await self._core.bus.publish(group)

    def _room(self) -> int | None:
        core = self._core
        if core.paused or not self._lease.admits or core.ledger.loaded_version < 0:
            return None
        if core.stopping and core.ledger.pending_step is not None:
            return None
        return core.ledger.room() or None

    def _group(self, group_id: str, prompt: Prompt) -> PromptGroup:
        config = self._core.config
        sampling = config.rollout.sampling
        seeds = [sample_seed(config.run.seed, group_id, sample) for sample in range(sampling.samples_per_group)]
        return PromptGroup(
            group_id=group_id,
            attempt=0,
            purpose=Purpose.TRAIN,
            task=Task(
                prompt_id=prompt.prompt_id,
                data_source=prompt.data_source,
                grader=config.reward.grader,
                ground_truth=prompt.ground_truth,
                environment=config.rollout.environment.name,
            ),
            prompt_tokens=prompt.tokens,
            sampling=Sampling(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                max_tokens=sampling.max_response_tokens,
                stop=sampling.stop,
            ),
            seeds=seeds,
            min_policy_version=max(0, self._core.ledger.loaded_version),
            deadline=self._deadline(),
        )

    def _deadline(self) -> float:
        return time.time() + self._core.config.rollout.group_deadline_s


def _expired(prompt: PromptGroup) -> GroupFailed:
    return GroupFailed(
        group_id=prompt.group_id,
        attempt=prompt.attempt,
        purpose=prompt.purpose,
        service="coordinator",
        worker="coordinator",
        kind="deadline",
        text=f"no answer by the deadline of attempt {prompt.attempt}",
        retryable=True,
    )
