"""The lines a person sees, and the table of a run."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from beamline.coordinator.launch.display import BarDisplay
from beamline.coordinator.launch.guard import remaining
from beamline.coordinator.launch.progress import Progress, step_line
from beamline.coordinator.launch.status import show_status
from beamline.coordinator.launch.supervisor import last_words, refusal
from beamline.coordinator.observe.view import RunView
from beamline.protocol.messages import Heartbeat, Metrics, Phase, PhaseName, ServiceFailed, StatusReply, WorkerState


def heartbeat(state: WorkerState, incarnation: str = "a") -> Heartbeat:
    return Heartbeat(
        service="rollout", worker="rollout-0", incarnation=incarnation, pid=7, state=state, policy_version=3,
        in_flight=2, rss_bytes=3 * 2**20, waiting_for="a group",
    )  # fmt: skip


def status(**left_out: str) -> StatusReply:
    """Of a run in which something happens; `left_out` by worker."""
    return StatusReply(
        run="demo", step=3, num_steps=40, phase=PhaseName.TRAIN, policy_version=2, paused=True,
        waiting_for="the trainer's update", ledger={"issued": 96, "trained": 64}, metrics={"reward/mean": 0.5},
        workers=[heartbeat(WorkerState.BUSY)], left_out=left_out,
    )  # fmt: skip


def test_a_worker_is_told_once_a_life() -> None:
    progress = Progress(RunView(40), now=lambda: 12.34)
    ready, starting = heartbeat(WorkerState.READY), heartbeat(WorkerState.STARTING)
    assert progress.lines(starting) == ["  12.3 s  rollout-0 is starting"]
    assert progress.lines(starting) == []
    assert progress.lines(ready) == ["  12.3 s  rollout-0 is ready (3 MiB)"]
    assert progress.lines(heartbeat(WorkerState.BUSY)) == []
    assert progress.lines(ready) == []
    assert progress.lines(heartbeat(WorkerState.READY, "b")) == ["  12.3 s  rollout-0 is ready (3 MiB)"]


def test_only_the_long_phases_are_told() -> None:
    progress = Progress(RunView(40), now=lambda: 0.0)

    def lines(phase: PhaseName) -> list[str]:
        return progress.lines(Phase(sequence=1, step=1, phase=phase, policy_version=5, granted=True))

    assert lines(PhaseName.GENERATE) == []
    assert lines(PhaseName.EVALUATE) == ["evaluate policy 5"]
    assert lines(PhaseName.EVALUATE) == []


def test_a_failure_is_told_with_its_traceback() -> None:
    traceback = 'Traceback (most recent call last):\n  File "loss.py", line 3\nNotFinite: the loss is NaN\n'
    failed = ServiceFailed(service="trainer", worker="trainer", error="the loss is NaN", traceback=traceback)
    assert Progress(RunView(1), now=lambda: 0.0).lines(failed) == [
        "trainer failed: the loss is NaN",
        "  Traceback (most recent call last):",
        '    File "loss.py", line 3',
        "  NotFinite: the loss is NaN",
    ]


def test_a_step_in_one_line() -> None:
    values = {
        "reward/mean": 0.4121, "reward/accuracy": 0.5, "tokens/response_mean": 28.26, "timing/step": 5.25,
        "policy/mismatch_abs_mean": 0.00012, "timing/generate": 2.1, "timing/train": 2.6, "timing/evaluate": 0.0,
    }  # fmt: skip
    assert step_line(3, 40, values) == (
        "step  3/40  reward 0.412  accuracy 50.0%  length 28.3  mismatch 1.2e-04  5.2 s (generate 2.1, train 2.6)"
    )


def test_a_step_of_adapters_tells_what_moved() -> None:
    moved = {"sync/adapter_bytes": 2.0**18, "sync/adapter_share": 0.0361}
    assert step_line(1, 4, moved) == "step 1/4  adapters 0.25 MiB, 3.6% of the model"


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"checkpoint/num_bytes": 3 * 2**20, "checkpoint/failed": 0.0}, "saved policy 6  3.0 MiB in 2.5 s"),
        ({"checkpoint/failed": 0.0}, "saved policy 6  exported in 2.5 s"),
        ({"checkpoint/failed": 1.0}, "policy 6 is NOT saved, and the run goes on: logs/coordinator.log says why"),
    ],
)
def test_what_came_of_a_save_in_one_line(values: dict[str, float], line: str) -> None:
    progress = Progress(RunView(), now=lambda: 0.0)
    told = Metrics(service="coordinator", worker="coordinator", step=6, values={"checkpoint/save_s": 2.5, **values})
    waited = Metrics(service="coordinator", worker="coordinator", step=6, values={"timing/checkpoint": 0.1})
    assert progress.lines(told) == [line]
    assert progress.lines(waited) == [], "a part of a step is no step"


def test_who_is_left_out_is_told_once_and_who_is_back() -> None:
    progress = Progress(RunView(4), now=lambda: 0.0)

    assert progress.lines(status()) == []
    late = status(rollout="a checksum differs")
    assert progress.lines(late) == ["the run goes on without rollout: a checksum differs"]
    assert progress.lines(late) == []
    assert progress.lines(status()) == ["rollout has caught up"]


@pytest.mark.parametrize(
    ("phase", "gauges", "expected"),
    [
        (PhaseName.START, {}, "1/4 workers started"),
        (PhaseName.GENERATE, {"progress/scored_groups": 3.0, "progress/needed_groups": 8.0}, "3/8 groups scored"),
        (PhaseName.TRAIN, {"progress/micro_batches_done": 2.0, "progress/micro_batches": 6.0}, "2/6 micro-batches"),
        (PhaseName.SYNC, {}, "1/1 workers serving"),
        (PhaseName.CHECKPOINT, {}, ""),
    ],
    ids=lambda value: str(value) if isinstance(value, PhaseName) else "",
)
def test_the_bars_tell_what_the_phase_is_about(phase: PhaseName, gauges: dict[str, float], expected: str) -> None:
    view = RunView(num_steps=40)
    view.left_out = {"rollout-7": "it is late"}
    view.apply(Phase(sequence=1, step=4, phase=phase, policy_version=3, granted=True), 1.0)
    view.apply(heartbeat(WorkerState.READY), 1.0)
    view.apply(Metrics(service="trainer", worker="trainer", step=-1, values=gauges), 1.0)
    file = io.StringIO()
    display = BarDisplay(Console(file=file, force_terminal=True, color_system=None, width=120))
    with display.shown():
        display.position(Progress(view, now=lambda: 0.0, num_workers=4))
    output = file.getvalue()
    assert "3/40 steps, without rollout-7" in output
    assert expected in output and str(phase) in output


def test_the_bar_leaves_lines_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    display, progress = BarDisplay(), Progress(RunView(40), now=lambda: 0.0)
    text = "rollout-0 [is] 3/4 ready: a line that is longer than a narrow terminal, and that nobody wraps or colours"
    with display.shown():
        display.line(text)
        display.position(progress)
    assert text in capsys.readouterr().out


def test_the_table_of_a_run() -> None:
    output = io.StringIO()
    show_status(status(), Console(file=output, width=200))
    text = output.getvalue()
    assert "run demo: step 3/40, train, paused" in text
    assert "groups: 96 issued = 64 trained" in text
    assert "rollout-0" in text
    assert "3 MiB" in text


def test_the_guard_ends_what_was_not_reported_ended() -> None:
    assert remaining(["+12\n", "+13\n", "-12\n"]) == {13}
    assert remaining(["+12\n", "done\n"]) == set()
    assert remaining([]) == set()


def test_the_last_words_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    assert last_words(log) == f"It wrote nothing to its log, {log}"
    log.write_text(
        "Traceback (most recent call last):\nold\nloading\nTraceback (most recent call last):\n  x\nOops: 3\n"
    )
    assert last_words(log) == f"The end of its log, {log}:\n  Traceback (most recent call last):\n    x\n  Oops: 3"
    log.write_text("starting\nerror: model.path=x is not a directory\nnats: closed\n")
    assert refusal(log) == "model.path=x is not a directory"
    error = '{"time":"2026-01-31T12:00:00.000Z","level":"ERROR","worker":"trainer","logger":"a","message":"it ends",'
    log.write_text(error + '"exception":"Traceback (most recent call last):\\n  x\\nOops: 4"}\n')
    assert last_words(log) == f"The end of its log, {log}:\n  Traceback (most recent call last):\n    x\n  Oops: 4"
