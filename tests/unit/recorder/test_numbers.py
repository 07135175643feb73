"""Live numbers in their file and in memory; what services say of a step reaches the recorder."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from beamline.coordinator.numbers import FORGET_AFTER_S, KEEP_EVERY_S, Numbers
from beamline.coordinator.observe.gauge_lines import GaugeLine
from beamline.coordinator.recorder import Recorder
from beamline.coordinator.summary import read_summary
from beamline.protocol.config import RunConfig
from beamline.protocol.messages import Metrics


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def live(worker: str, **values: float) -> Metrics:
    named = {f"{name.replace('__', '/')}/{worker}": value for name, value in values.items()}
    return Metrics(service="rollout", worker=worker, step=-1, values=named)


def of_step(service: str, step: int, values: Mapping[str, float]) -> Metrics:
    return Metrics(service=service, worker=service, step=step, values=dict(values))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def numbers(tmp_path: Path, clock: Clock) -> Numbers:
    return Numbers(tmp_path / "gauges.jsonl", clock)


@pytest.fixture
def recorder(tmp_path: Path, numbers: Numbers, clock: Clock) -> Recorder:
    return Recorder(tmp_path, RunConfig(), [numbers], now=clock)


async def test_each_worker_has_a_line_every_few_seconds(
    tmp_path: Path, numbers: Numbers, recorder: Recorder, clock: Clock
) -> None:
    for second in range(21):
        clock.now = 1000.0 + second
        for worker in ("rollout-0", "rollout-1"):
            await numbers.hear(live(worker, engine__running=second), recorder)
    lines = [
        msgspec.json.decode(line, type=GaugeLine) for line in (tmp_path / "gauges.jsonl").read_bytes().splitlines()
    ]
    assert [line.time for line in lines if line.worker == "rollout-1"] == [1000, 1005, 1010, 1015, 1020]
    assert len(lines) == 10 and KEEP_EVERY_S == 5
    assert lines[-1] == GaugeLine(
        time=1020, service="rollout", worker="rollout-1", values={"engine/running/rollout-1": 20}
    )


async def test_the_latest_of_each_name_is_known(numbers: Numbers, recorder: Recorder, clock: Clock) -> None:
    recorder.record_step(1, {"reward/mean": 0.25, "resources/rss_bytes/rollout-0": 10.0})
    recorder.record_step(2, {"reward/mean": 0.5})
    await numbers.hear(live("rollout-0", engine__running=3, resources__rss_bytes=20), recorder)
    assert numbers.latest() == {
        "reward/mean": 0.5, "engine/running/rollout-0": 3, "resources/rss_bytes/rollout-0": 20,
    }  # fmt: skip
    clock.now += 1
    recorder.record_step(3, {"resources/rss_bytes/rollout-0": 10.0})
    assert numbers.latest()["resources/rss_bytes/rollout-0"] == 10, "it was recorded after it was heard"
    clock.now += FORGET_AFTER_S
    assert numbers.latest() == {"reward/mean": 0.5, "resources/rss_bytes/rollout-0": 10}


async def test_what_services_say_of_a_step_is_recorded_with_it(
    tmp_path: Path, numbers: Numbers, recorder: Recorder
) -> None:
    recorder.record_step(1, {"reward/mean": 0.5, "policy/loss": 1.0})
    await numbers.hear(of_step("rollout", 1, {"engine/groups/rollout-0": 4.0}), recorder)
    await numbers.hear(of_step("reward", 1, {"grading/groups/reward": 3.0}), recorder)
    await numbers.hear(of_step("trainer", 1, {"policy/loss": 2.0}), recorder)  # the recorder has them already
    ledger = dict.fromkeys(("issued", "trained", "filtered", "stale", "failed"), 0)
    recorder.finish("finished", ledger)
    (step,) = read_summary(tmp_path / "summary.json").steps
    assert step.values == {
        "reward/mean": 0.5, "policy/loss": 1, "engine/groups/rollout-0": 4, "grading/groups/reward": 3,
    }  # fmt: skip
    assert numbers.latest()["engine/groups/rollout-0"] == 4


async def test_what_is_no_number_is_left_out_and_said(
    numbers: Numbers, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    await numbers.hear(of_step("rollout", 1, {"engine/tokens_per_s/rollout-0": float("nan")}), recorder)
    assert "engine/tokens_per_s/rollout-0 of step 1 is nan" in caplog.text


async def test_a_file_that_cannot_be_written_is_said_once(
    tmp_path: Path, recorder: Recorder, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = Numbers(tmp_path, clock)  # a folder
    for _ in range(3):
        clock.now += 10
        await numbers.hear(live("rollout-0", engine__running=3), recorder)
    assert caplog.text.count("live numbers are no longer kept") == 1
    assert numbers.latest() == {"engine/running/rollout-0": 3}
