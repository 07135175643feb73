"""One message a step, sent when a phase says that the step is over, and the live numbers beside each heartbeat."""

from collections.abc import Callable

import pytest

from beamline.protocol import messages as m
from beamline.protocol.errors import BusUnavailable
from beamline.protocol.messages import PhaseName
from beamline.runtime.step_metrics import LIVE, StepMetrics, live_metrics


def phase(name: PhaseName, version: int, granted: bool = True) -> m.Phase:
    return m.Phase(sequence=1, step=version + 1, phase=name, policy_version=version, granted=granted)


def step_of(start: int) -> list[m.Phase]:
    """The phases of a step that starts from policy `start`, where devices are shared."""
    return [
        phase(PhaseName.GENERATE, start, granted=False),
        phase(PhaseName.GENERATE, start),
        phase(PhaseName.TRAIN, start, granted=False),
        phase(PhaseName.TRAIN, start),
        phase(PhaseName.SYNC, start + 1),
    ]


class Told:
    """Takes messages; each `take` counts up."""

    def __init__(self) -> None:
        self.messages: list[m.Metrics] = []
        self.taken = 0
        self.metrics = StepMetrics("reward", "reward-1", self.publish, self.take)

    async def publish(self, message: m.Message) -> None:
        assert isinstance(message, m.Metrics)
        self.messages.append(message)

    def take(self) -> dict[str, float]:
        self.taken += 1
        return {"grading/groups/reward-1": float(self.taken)}

    async def hear(self, *phases: m.Phase) -> list[int]:
        """The steps that were told of."""
        for one in phases:
            await self.metrics.on_phase(one)
        return [message.step for message in self.messages]


async def test_each_step_is_told_once_after_its_evaluation() -> None:
    told = Told()
    evaluation = [phase(PhaseName.EVALUATE, 1, granted=False), phase(PhaseName.EVALUATE, 1)]
    assert await told.hear(*step_of(0), phase(PhaseName.CHECKPOINT, 1), *evaluation) == []
    assert await told.hear(*step_of(1), *step_of(1)) == [1]
    assert await told.hear(phase(PhaseName.CHECKPOINT, 2), phase(PhaseName.DONE, 2)) == [1, 2]
    assert told.messages[0] == m.Metrics(
        service="reward", worker="reward-1", step=1, values={"grading/groups/reward-1": 1.0}
    )


async def test_an_evaluation_before_the_first_step_is_told_as_step_0() -> None:
    assert await Told().hear(phase(PhaseName.EVALUATE, 0), *step_of(0), *step_of(1)) == [0, 1]


async def test_a_worker_that_starts_late_tells_of_the_steps_that_end_from_then_on() -> None:
    assert await Told().hear(phase(PhaseName.TRAIN, 6), phase(PhaseName.SYNC, 7), *step_of(7)) == [7]
    assert await Told().hear(phase(PhaseName.SYNC, 7), *step_of(7)) == [7]
    assert await Told().hear(phase(PhaseName.GENERATE, 7), *step_of(8)) == [8]


async def test_phases_that_were_not_heard_leave_no_step_out() -> None:
    assert await Told().hear(phase(PhaseName.GENERATE, 1), phase(PhaseName.GENERATE, 4)) == [2, 3, 4]


async def test_a_broker_that_is_away_costs_the_numbers_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async def away(message: m.Message) -> None:
        raise BusUnavailable("nats-server is away")

    metrics = StepMetrics("reward", "reward-1", away, dict)
    for one in (*step_of(0), *step_of(1)):
        await metrics.on_phase(one)
    assert "the numbers of step 1 are lost: nats-server is away" in caplog.text


def test_live_numbers_are_those_of_the_heartbeat_and_the_gauges(is_documented: Callable[[str], bool]) -> None:
    heartbeat = m.Heartbeat(
        service="rollout", worker="rollout-0", incarnation="a", pid=1, state=m.WorkerState.READY,
        policy_version=3, in_flight=2, rss_bytes=1000,
    )  # fmt: skip
    live = live_metrics(heartbeat, [lambda: {"engine/running/rollout-0": 4.0}, lambda: {"engine/waiting/rollout-0": 0}])
    assert (live.service, live.worker, live.step) == ("rollout", "rollout-0", LIVE)
    assert live.values == {
        "resources/rss_bytes/rollout-0": 1000,
        "workers/in_flight/rollout-0": 2,
        "workers/policy_version/rollout-0": 3,
        "engine/running/rollout-0": 4,
        "engine/waiting/rollout-0": 0,
    }
    assert all(map(is_documented, live.values))
