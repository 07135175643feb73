"""A run's folder that goes on from an earlier step: nothing is told twice, and nothing is deleted."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from beamline.coordinator.loggers import open_loggers
from beamline.coordinator.metrics_file import MetricsTail, read_metrics
from beamline.coordinator.recorder import Recorder
from beamline.coordinator.samples import samples_path
from beamline.coordinator.set_aside import set_aside
from beamline.coordinator.summary import read_summary
from beamline.protocol.config import RunConfig, RunSection
from beamline.protocol.doctor import KeptSamples
from beamline.runtime.sample_files import write_index


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def told_run(finished_run: Path) -> Path:
    for step in (9, 10, 11):
        path = samples_path(finished_run / "samples", step)
        path.parent.mkdir(exist_ok=True)
        path.write_text(str(step))
    return finished_run


def test_what_is_later_moves_and_the_rest_stays(told_run: Path) -> None:
    before, lines = files(told_run), read_metrics(told_run / "metrics.jsonl")
    aside = set_aside(told_run, 10)
    assert aside == told_run / "superseded" / "1"
    assert read_metrics(told_run / "metrics.jsonl") == [line for line in lines if line.step <= 10]
    assert read_metrics(aside / "metrics.jsonl") == [line for line in lines if line.step > 10]
    moved = files(aside)
    del moved["metrics.jsonl"]
    assert moved.keys() == {
        "summary.json",
        "report.html",
        "samples/global_step_11.jsonl",
        *(name for name in before if name.startswith(("evals/global_step_15/", "evals/global_step_20/"))),
    }
    stays = {name: content for name, content in before.items() if name not in moved and name != "metrics.jsonl"}
    assert {name: content for name, content in files(told_run).items() if name in stays} == stays
    assert all(before[name] == content for name, content in moved.items())


@pytest.mark.parametrize(("policy_version", "moves"), [(10, False), (15, True), (None, True)])
def test_the_doctors_samples_move_where_they_are_of_a_later_policy(
    policy_version: int | None, moves: bool, tmp_path: Path
) -> None:
    (tmp_path / "doctor").mkdir()
    (tmp_path / "doctor" / "samples.json").write_text("damaged")
    if policy_version is not None:
        write_index(
            tmp_path / "doctor",
            KeptSamples(policy_version=policy_version, temperature=1.0, top_p=1.0, manifest="", groups=[]),
        )
    aside = set_aside(tmp_path, 10)
    assert (tmp_path / "doctor").exists() is not moves
    assert (aside is not None and (aside / "doctor").is_dir()) is moves


def test_a_second_time_there_is_nothing_to_move(told_run: Path) -> None:
    set_aside(told_run, 10)
    before = files(told_run)
    assert set_aside(told_run, 10) is None
    assert files(told_run) == before
    assert set_aside(told_run, -1) == told_run / "superseded" / "2"
    assert read_metrics(told_run / "metrics.jsonl") == []


def test_a_new_runs_folder_stays_as_it_is(tmp_path: Path) -> None:
    assert set_aside(tmp_path, -1) is None
    assert list(tmp_path.iterdir()) == []


def test_whoever_was_killed_in_the_middle_goes_on(told_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files were moved, the metrics not yet: the second try finishes, and the lines are kept once at least."""
    lines = read_metrics(told_run / "metrics.jsonl")

    def die(path: Path, content: bytes) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("beamline.coordinator.set_aside.write_atomically", die)
        set_aside(told_run, 10)
    assert read_metrics(told_run / "metrics.jsonl") == lines
    aside = set_aside(told_run, 10)
    assert aside == told_run / "superseded" / "2"
    assert read_metrics(aside / "metrics.jsonl") == [line for line in lines if line.step > 10]


def test_who_follows_the_metrics_reads_the_new_file_from_its_start(told_run: Path) -> None:
    tail = MetricsTail(told_run / "metrics.jsonl")
    assert max(line.step for line in tail.read()) == 20
    set_aside(told_run, 10)
    assert {line.step for line in tail.read()} == set(range(11))
    Recorder(told_run, RunConfig()).record_step(11, {"reward/mean": 0.5})
    assert [line.step for line in tail.read()] == [11]


def test_the_summary_covers_both_parts(told_run: Path) -> None:
    set_aside(told_run, 10)
    recorder = Recorder(told_run, RunConfig(run=RunSection(name="demo")))
    for step in range(11, 16):
        recorder.record_step(step, {"reward/mean": 9.0, "timing/step": 1.0})
    ledger = {"issued": 0, "trained": 0, "filtered": 0, "stale": 0, "failed": 0}
    summary = recorder.finish("finished", ledger, started=0.0)
    assert [step.step for step in summary.steps] == list(range(1, 16))
    assert {step.step for step in summary.steps if step.values["reward/mean"] == 9.0} == set(range(11, 16))
    assert sorted({evaluation.step for evaluation in summary.evaluations}) == [0, 5, 10]
    assert read_summary(told_run / "summary.json").steps == summary.steps


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    config = RunConfig(run=RunSection(name="r1", loggers=["tensorboard"]))
    for second, void_from, steps, value in ((1, None, range(1, 9), 1.0), (2, 7, range(7, 11), 2.0)):
        (logger,) = open_loggers(tmp_path, config, void_from)
        for step in steps:
            logger.log(step, 1000.0 + step, {"reward/mean": value})
        logger.close()
        (file,) = (tmp_path / "tensorboard").glob("*.tfevents.1?????????.*")
        file.rename(file.with_name(f"events.out.tfevents.{second}.host"))  # the name is the second of its start
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("reward/mean")
    assert [(event.step, event.value) for event in shown] == [(n, 1.0 if n < 7 else 2.0) for n in range(1, 11)]
