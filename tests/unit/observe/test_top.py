"""What `beamline top` shows of a run, at several sizes: the facts, and that the screen is never too small for it."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from beamline.coordinator.metrics_file import MetricsFile
from beamline.coordinator.observe.flow import stages, under_way
from beamline.coordinator.observe.top import top
from beamline.coordinator.observe.top_screen import Screen, clock, render
from beamline.coordinator.observe.view import RunView
from beamline.protocol import messages as m
from beamline.protocol.config import RunConfig
from beamline.protocol.errors import ConfigError
from beamline.protocol.metric_schema import find
from beamline.runtime.run_files import write_config

NOW = 1_000_000.0
COORDINATOR = {
    "ledger/issued": 100.0, "ledger/in_flight": 36.0, "ledger/trained": 64.0, "progress/scored_groups": 20.0,
    "progress/needed_groups": 32.0, "queue/pending/rollout": 5.0, "queue/pending/reward": 2.0,
}  # fmt: skip
TRAINER = {"progress/micro_batches_done": 3.0, "progress/micro_batches": 12.0}
STEP = {
    "reward/mean": 0.412, "timing/step": 5.2, "timing/generate": 2.1, "tokens/response_mean": 28.3,
    "throughput/tokens_per_s": 812.0, "throughput/generate_tokens_per_s": 1904.0,
}  # fmt: skip


def heartbeat(service: str, worker: str, state: m.WorkerState = m.WorkerState.BUSY, **more: object) -> m.Heartbeat:
    known = {"policy_version": -1, "in_flight": 3, "rss_bytes": 3 * 2**30, **more}
    return m.Heartbeat(service=service, worker=worker, incarnation="a", pid=4711, state=state, **known)  # type: ignore[arg-type]


def live_view(num_rollouts: int = 2) -> RunView:
    """A run in step 3 of 50 that everything is known of."""
    view = RunView(num_steps=50)
    view.apply(m.Phase(sequence=3, step=3, phase=m.PhaseName.GENERATE, policy_version=2, granted=True), NOW - 4)
    idle = m.Wait(what="an answer from the ring", since=NOW - 50, until=0.0)
    wait = m.Wait(what="12 of 32 groups of step 3", since=NOW - 42, until=NOW + 60, on=["rollout"])
    view.apply(heartbeat("coordinator", "coordinator", waits=[idle, wait]), NOW - 1)
    view.apply(heartbeat("trainer", "trainer", m.WorkerState.PAUSED, policy_version=2), NOW - 2)
    view.apply(heartbeat("reward", "reward"), NOW - 1)
    for number in range(num_rollouts):
        view.apply(heartbeat("rollout", f"rollout-{number}", policy_version=2 - number % 2), NOW - 1)
        gauges = {f"workers/in_flight/rollout-{number}": 7.0}
        view.apply(m.Metrics(service="rollout", worker=f"rollout-{number}", step=-1, values=gauges), NOW)
    view.apply(m.Metrics(service="reward", worker="reward", step=-1, values={"workers/in_flight/reward": 2.0}), NOW)
    view.apply(m.Metrics(service="coordinator", worker="coordinator", step=-1, values=COORDINATOR), NOW)
    view.apply(m.Metrics(service="trainer", worker="trainer", step=-1, values=TRAINER), NOW)
    view.apply(m.Metrics(service="coordinator", worker="coordinator", step=2, values=STEP), NOW - 4)
    return view


def shown(view: RunView, width: int, height: int, now: float = NOW, **more: object) -> list[str]:
    """The screen's lines without colours."""
    screen = Screen(run="demo", width=width, height=height, started=NOW - 3723, **more)  # type: ignore[arg-type]
    output = io.StringIO()
    Console(file=output, width=width, height=height, color_system=None).print(render(view, screen, now))
    return output.getvalue().rstrip("\n").split("\n")


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (120, 30)])
def test_everything_is_on_the_screen(width: int, height: int) -> None:
    lines = shown(live_view(), width, height)
    text = "\n".join(lines)
    assert len(lines) <= height and max(map(len, lines)) <= width
    assert re.search(r"demo  step 3/50  generate  policy 2  1:02:03 elapsed  about 0:04:0\d left", lines[0])
    assert re.search(r"^ run .*2/50 steps", text, re.MULTILINE)
    assert " generate for 4 s, waiting for 12 of 32 groups of step 3 (42 s)" in lines
    assert re.search(r"^ issued .*100 groups", text, re.MULTILINE)
    assert re.search(r"^ sampling .*14 groups, 5 queued", text, re.MULTILINE)
    assert re.search(r"^ scoring .*2 groups, 2 queued", text, re.MULTILINE)
    assert re.search(r"^ scored .*20/32 groups", text, re.MULTILINE)
    assert re.search(r"^ training .*3/12 micro-batches", text, re.MULTILINE)
    assert re.search(r"^ trained .*64 groups", text, re.MULTILINE)
    assert "1904 tokens/s generated   812 tokens/s overall   queues: reward 2, rollout 5" in text
    assert "step  2/50  reward 0.412" in text
    assert re.search(r"rollout-1 +busy +1 +3 +3.0 GiB +1 s", text)
    assert re.search(r"coordinator +busy +- +3 +3.0 GiB +1 s .*12 of 32 groups", text)
    assert ("4711" in text) == (width >= 100)
    assert "q leaves" in lines[-1]


def test_bars_are_as_long_as_what_they_tell() -> None:
    (scored,) = [line for line in shown(live_view(), 120, 30) if line.startswith(" scored")]
    assert len(re.findall("[━╸]", scored)) == pytest.approx(60 * 20 / 32, abs=1)
    assert {stage.name: round(stage.share, 2) for stage in stages(live_view())} == {
        "issued": 0.0, "sampling": 0.39, "scoring": 0.06, "scored": 0.62, "training": 0.25, "trained": 0.64,
    }  # fmt: skip


def test_what_is_wrong_is_marked() -> None:
    view = live_view()
    failed = m.ServiceFailed(service="trainer", worker="trainer", error="the loss is NaN\nmore", traceback="")
    view.apply(failed, NOW)
    view.left_out = {"rollout-1": "a checksum differs"}
    text = "\n".join(shown(view, 100, 30, now=NOW + 42, notes=["the bus is away"]))
    assert re.search(r"rollout-0 +silent .* 43 s", text)
    assert re.search(r"rollout-1 .*left out: a checksum differs", text)
    assert re.search(r"\d\d:\d\d:\d\d trainer failed: the loss is NaN$", text, re.MULTILINE)
    assert "the bus is away" in text


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 16), (40, 10)])
def test_it_fits_with_more_workers_than_lines(width: int, height: int) -> None:
    view = live_view(num_rollouts=40)
    view.apply(heartbeat("rollout", "rollout-33", m.WorkerState.STARTING), NOW)
    lines = shown(view, width, height)
    assert len(lines) <= height and max(map(len, lines)) <= width
    assert any("rollout-33" in line for line in lines), "one that needs a look comes before others"
    assert any(re.search(r"and \d+ more", line) for line in lines)
    assert "q leaves" in lines[-1]


def test_a_run_that_has_just_started() -> None:
    lines = shown(RunView(num_steps=5), 80, 24)
    assert re.search(r"demo  step 1/5  start  policy 0", lines[0])
    assert not any("groups" in line for line in lines)
    view = RunView(num_steps=5)
    view.apply(m.Metrics(service="coordinator", worker="coordinator", step=0, values={"timing/evaluate": 2.0}), NOW)
    assert not any("step  0" in line or "step 0" in line for line in shown(view, 80, 24))


async def test_a_run_that_was_ended_or_is_half_gone_is_said_plainly(tmp_path: Path) -> None:
    output = io.StringIO()
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        await top(tmp_path, Console(file=output))
    write_config(tmp_path, RunConfig())
    MetricsFile(tmp_path / "metrics.jsonl").log(3, NOW, {"timing/step": 2.0})
    await top(tmp_path, Console(file=output, width=200))
    num_steps = RunConfig().trainer.num_steps
    assert output.getvalue() == f"run {tmp_path.name} was ended before its end: 3/{num_steps} steps\n"


def test_the_ledger_is_known_by_the_status_too() -> None:
    view = RunView(num_steps=5)
    view.ledger = {"issued": 8, "trained": 4, "in_flight": 4}
    assert [(stage.name, stage.num) for stage in stages(view)] == [("issued", 8), ("trained", 4)]
    assert under_way(view) is None


def test_each_phase_has_its_own_measure() -> None:
    view = live_view()
    measures = {}
    for name in m.PhaseName:
        view.apply(m.Phase(sequence=4, step=3, phase=name, policy_version=2, granted=True), NOW)
        stage = under_way(view, num_workers=6)
        measures[str(name)] = f"{stage.num:.0f}/{stage.total:.0f} {stage.name}" if stage else ""
    assert measures["start"] == "5/6 started"
    assert measures["generate"] == measures["evaluate"] == "20/32 scored"
    assert measures["checkpoint"] == measures["done"] == ""
    view.apply(m.Phase(sequence=5, step=4, phase=m.PhaseName.GENERATE, policy_version=3, granted=True), NOW + 1)
    assert under_way(view) is None, "what was told before is of the phase before"
    assert measures["train"] == "3/12 training"
    assert measures["sync"] == "1/2 serving"


def test_every_live_value_is_one_of_the_schema() -> None:
    names = [*COORDINATOR, *TRAINER, *STEP, "workers/in_flight/rollout-0", "ledger/filtered"]
    assert [name for name in names if find(name) is None] == []


def test_times_are_read_at_a_glance() -> None:
    assert [clock(s) for s in (-1, 59.9, 3723, 200_000)] == ["0:00:00", "0:00:59", "1:02:03", "2 d 7:33:20"]
