"""One run from start to end: the coordinator's main loop, and the loops beside it.

The main loop consumes scored groups and policy updates and produces phases and train batches. Beside it, `admit` issues
prompts while the ledger has room, and the inbox takes scored groups, failures, loads, releases and heartbeats. All of
them meet in the state and wake each other by its pulse.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from opentelemetry import trace

from beamline.coordinator import journal as j
from beamline.coordinator.admission import Admission
from beamline.coordinator.control import Control
from beamline.coordinator.core import Core
from beamline.coordinator.drawing import Drawing
from beamline.coordinator.evaluator import Evaluator
from beamline.coordinator.fence import FenceKeeper
from beamline.coordinator.inbox import Inbox
from beamline.coordinator.lease import Lease
from beamline.coordinator.readiness import Readiness
from beamline.coordinator.recorder import Recorder
from beamline.coordinator.saver import Saver
from beamline.coordinator.step_report import PhaseClock, group_metrics, sampling_metrics, throughput
from beamline.protocol import messages as m
from beamline.protocol.errors import BeamlineError, DeadlineExceeded

log = logging.getLogger(__name__)
tracer = trace.get_tracer(__name__)

LAST_NUMBERS_S = 5.0


class Coordinator:
    """The parts are chosen in `__main__`; nothing here knows which bus, lease or blob store it has."""

    def __init__(
        self, core: Core, admission: Admission, evaluator: Evaluator, lease: Lease, recorder: Recorder
    ) -> None:
        self.core, self.ledger = core, core.ledger
        self.admission = admission
        self.evaluator = evaluator
        self.lease = lease
        self.recorder = recorder
        self.saver = Saver(core, recorder, admission.cursor, self.enter, self.when)
        self.inbox = Inbox(core, admission, evaluator, self.saver)
        self.ready = Readiness(core)
        self.fence = FenceKeeper(core)
        missing_groups = self.ready.missing_groups
        self.drawing = Drawing(core, lambda: self.when(self.ledger.next_batch, missing_groups, "rollout", "reward"))
        self.clock = PhaseClock()

    async def run(self) -> None:
        """The whole run: wait for the workers, then save, evaluate and step until the last step; write the summary."""
        traces = self.core.traces
        with traces.start():
            await self.start()
        while self.ledger.step < self.core.last_step:
            with traces.step(self.ledger.step + 1):
                await self.saver.save_if_due()
                await self.evaluate_if_due()
                await self.run_step()
        with traces.finish():
            await self.saver.save_if_due()
            await self.evaluate_if_due()
            await self.finish()

    async def run_step(self) -> None:
        """Turn policy step-1 into policy step. Waits for scored groups, for the trainer, and for the workers' loads."""
        self.clock.start()
        groups = await self.draw_groups()
        update = await self.train(groups)
        await self.sync(update)
        await self.report(groups, update)

    async def draw_groups(self) -> list[m.ScoredGroup]:
        """Generate until the step's batch is bound. Returns all groups that were drawn for it."""
        with self.clock.phase("generate"):
            if self.ledger.pending_step is None:
                await self.enter(m.PhaseName.GENERATE)
            return await self.drawing.fill()

    async def train(self, drawn: list[m.ScoredGroup]) -> m.PolicyUpdate:
        """Hand the bound groups to the trainer; its update ends them as trained."""
        step = self.ledger.step + 1
        with self.clock.phase("train"):
            await self.enter(m.PhaseName.TRAIN)
            bound, traceparents = self.ledger.batch(step), self.ledger.traceparents(step)
            await self.core.bus.publish(self.core.batcher.train_batch(step, bound, traceparents))
            await self.recorder.keep_samples(step, bound)
            update = await self.when(
                lambda: self.ready.update(step),
                lambda: f"PolicyUpdate for step {step} from the trainer",
                "trainer",
            )
            # Before the journal ends the step: a coordinator that dies in between must not lose its figures.
            self.recorder.keep_step(step, self.figures(drawn, update))
            for group_id, why in update.failed_groups.items():
                log.error("group %s was not trained: %s", group_id, why)
            await self.core.commit(j.Updated(step=step, failed=list(update.failed_groups)))
            await self.core.release(group.group_id for group in drawn)
        return update

    async def sync(self, update: m.PolicyUpdate) -> None:
        """Take the new policy through the workers; it goes on without those that cannot serve it."""
        with self.clock.phase("sync"):
            await self.enter(m.PhaseName.SYNC)
            await self.fence.let_through(update.policy_version)
            self.ledger.record_loaded(update.policy_version)

    @tracer.start_as_current_span("report")
    async def report(self, drawn: list[m.ScoredGroup], update: m.PolicyUpdate) -> None:
        """Write the step down and tell whoever follows the run."""
        values = {**self.figures(drawn, update), **self.clock.spent()}
        values["timing/step"] = self.clock.total()
        values |= {f"ledger/{name}": float(count) for name, count in self.ledger.counts().items()}
        values |= self.admission.data_metrics()
        values |= self.core.roster.sync_values(update.policy_version)
        values |= self.core.roster.memory_values()
        values |= throughput(values)
        self.core.metrics = values
        self.recorder.record_step(update.step, values)
        await self.core.bus.publish(
            m.Metrics(service="coordinator", worker="coordinator", step=update.step, values=values)
        )

    def figures(self, drawn: list[m.ScoredGroup], update: m.PolicyUpdate) -> dict[str, float]:
        """What is known of a step as soon as it is trained."""
        sampling = sampling_metrics(*self.ledger.num_drawn(update.step), self.core.batcher.groups_per_step)
        return {**group_metrics(update.step, drawn), **sampling, **update.stats}

    async def evaluate_if_due(self) -> None:
        """Evaluate before the first step, every `eval_interval` steps, and after the last."""
        interval, step = self.core.config.trainer.eval_interval, self.ledger.step
        due = interval > 0 and (step % interval == 0 or step >= self.core.last_step)
        if not due or step in self.core.state.evaluated:
            return
        self.clock.start()
        with self.clock.phase("evaluate"):
            await self.enter(m.PhaseName.EVALUATE)
            await self.evaluator.evaluate(step)
        self.recorder.record_step(step, self.clock.spent())
        await self.core.commit(j.Evaluated(policy_version=step))

    async def start(self) -> None:
        """Wait until every service is alive, then take the newest policy through the workers, perhaps once more."""
        await self.admission.republish()
        await self.saver.republish()
        deadline_s = self.core.config.coordinator.start_deadline_s
        missing = self.ready.missing_services
        await self.core.pulse.when(lambda: not missing(), missing, deadline_s, on=self.ready.missing_names)
        newest = await self.when(lambda: self.ready.update(self.ledger.step), lambda: "the trainer's policy", "trainer")
        await self.fence.let_through(newest.policy_version)
        self.ledger.record_loaded(self.ledger.step)
        self.core.pulse.beat()

    async def finish(self) -> None:
        """Wait for what is being saved, end what is in flight, say that the run is done, write summary and report.

        Raises BeamlineError at the very end where the last policy could not be saved.
        """
        error, saves = await self.saver.finish(), self.core.state.saves
        left = self.ledger.open_groups()
        await self.core.commit(j.Closed())
        await self.core.release(left)
        await self.enter(m.PhaseName.DONE)
        await self.hear_the_last()
        await asyncio.to_thread(
            self.recorder.finish,
            status="failed" if error else "stopped" if self.core.stopping else "finished",
            ledger=self.ledger.counts(),
            checkpoint=saves.checkpoint.path if saves.checkpoint else "",
            export=saves.export.export_path if saves.export else "",
            started=self.core.state.started,
        )
        if error:
            raise BeamlineError(f"the run has ended, and its last policy, {self.ledger.step}, is not saved: {error}")

    async def hear_the_last(self) -> None:
        """Workers tell of the last step when they hear that the run is done; the summary waits for it, not for long."""
        missing = self.ready.missing_numbers
        with suppress(DeadlineExceeded):
            await self.core.pulse.when(lambda: not missing(), lambda: f"numbers of {missing()}", LAST_NUMBERS_S)

    async def enter(self, phase: m.PhaseName) -> None:
        """Acquire the lease for a phase of the step under way."""
        if self.lease.phase is not phase:
            await self.lease.acquire(phase, self.ledger.step + 1, self.ledger.step)
            self.core.pulse.beat()

    async def when[T](self, condition: Callable[[], T | None], waiting_for: Callable[[], str], *on: str) -> T:
        """Wait for services to change the state, at most `coordinator.step_deadline_s`."""
        return await self.core.pulse.when(condition, waiting_for, self.core.config.coordinator.step_deadline_s, on)

    async def serve(self) -> None:
        """The whole coordinator: the main loop with the loops beside it; returns when the main loop has.

        The first error of any loop ends all of them.
        """
        bus = self.core.bus
        main = asyncio.create_task(self.run())
        beside = (
            bus.work("coordinator", self.inbox.collect, concurrency=16),
            bus.follow(m.PolicyUpdate, self.inbox.follow),
            bus.subscribe(bus.subjects.heartbeat(), self.inbox.listen),
            bus.serve(Control(self.core, self.lease).answer),
            self.admission.admit(),
            self.admission.expire(),
        )
        tasks = [main, *(asyncio.create_task(loop) for loop in beside)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
