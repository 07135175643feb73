"""What a coordinator tells live, and when services tell of a step, in a ring that runs to its end."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from beamline.coordinator.gauges import CoordinatorGauges
from beamline.protocol.config import RunConfig
from beamline.protocol.messages import Message, Metrics, Phase, PhaseName
from beamline.runtime.step_metrics import StepMetrics
from ring_run import NUM_STEPS, Ring, check

GROUPS_PER_STEP = 4
CONFIG = msgspec.convert(
    {
        "run": {"name": "ring"},
        "rollout": {"sampling": {"groups_per_step": GROUPS_PER_STEP, "samples_per_group": 2}},
        "trainer": {"num_steps": NUM_STEPS, "eval_interval": 2},
    },
    RunConfig,
)


class Watched(Ring):
    """Reads the gauges whenever the coordinator's state changes."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(3, run_dir, config=CONFIG, num_kills=0)
        self.seen: list[tuple[PhaseName, dict[str, float]]] = []
        self.told: list[Metrics] = []
        self.steps = StepMetrics("reward", "reward-0", self.bus.publish, lambda: {"grading/groups/reward-0": 1.0})

    async def coordinate(self) -> None:
        watching: list[asyncio.Task[None]] = []
        asyncio.get_running_loop().call_soon(lambda: watching.append(asyncio.create_task(self.watch())))
        try:
            await super().coordinate()
        finally:
            for task in watching:
                task.cancel()

    async def watch(self) -> None:
        while not hasattr(self, "evaluator"):
            await asyncio.sleep(0)
        gauges = CoordinatorGauges(self.core, self.evaluator)
        async with asyncio.TaskGroup() as group:
            group.create_task(gauges.look())
            group.create_task(self.bus.subscribe(self.bus.subjects.metrics(), self.hear))
            group.create_task(self.bus.follow(Phase, self.steps.on_phase))
            group.create_task(self.core.pulse.until(lambda: self.seen.append((self.lease.phase, gauges.read()))))

    async def hear(self, message: Message) -> None:
        assert isinstance(message, Metrics)
        self.told.append(message)


def test_progress_ledger_queues_and_blobs_are_told(tmp_path: Path, is_documented: Callable[[str], bool]) -> None:
    ring = Watched(tmp_path)
    asyncio.run(ring.run())
    check(ring)
    values = [told for _, told in ring.seen]
    assert sorted(name for told in values for name in told if not is_documented(name)) == []
    assert {told["progress/step"] for told in values} == set(map(float, range(NUM_STEPS + 1)))
    for told in values:
        ends = sum(told[f"ledger/{end}"] for end in ("trained", "filtered", "stale", "failed", "in_flight"))
        assert told["ledger/issued"] == ends
    gathered = {told["progress/scored_groups"] for phase, told in ring.seen if phase is PhaseName.GENERATE}
    assert {0.0, 1.0, 2.0, 3.0} <= gathered
    needed = {phase: {told["progress/needed_groups"] for p, told in ring.seen if p is phase} for phase in PhaseName}
    assert GROUPS_PER_STEP in needed[PhaseName.GENERATE]
    assert 3.0 in needed[PhaseName.EVALUATE], "the problems of the evaluation"
    assert needed[PhaseName.TRAIN] == {0.0}
    last = values[-1]
    assert {"queue/pending/rollout", "queue/unacked/reward", "blobs/used_bytes"} <= last.keys()
    assert last["workers/silent_s/reward-0"] >= 0
    of_whole_steps = [t for t in ring.told if t.service == "reward" or "timing/step" in t.values]
    of_steps = {
        service: [t.step for t in of_whole_steps if t.service == service] for service in ("coordinator", "reward")
    }
    assert of_steps["coordinator"] == list(range(1, NUM_STEPS + 1))
    assert of_steps["reward"] == list(range(NUM_STEPS + 1)), "the evaluation before the first step is told as step 0"
