"""The recorder: what is on disk after a run, after a kill, and after bad values."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from beamline.coordinator.eval_dumps import dump_path, read_completions, write_completions
from beamline.coordinator.metrics_file import MetricsFile, read_metrics
from beamline.coordinator.recorder import Recorder
from beamline.coordinator.summary import read_summary
from beamline.protocol.config import RunConfig, RunSection
from beamline.protocol.errors import BeamlineError, ConfigError
from beamline.protocol.messages import EvalResult

LEDGER = {"issued": 5, "trained": 3, "filtered": 1, "stale": 0, "failed": 1, "in_flight": 0}
ANSWER = {
    "prompt_id": "a",
    "sample": 0,
    "prompt": "1+1",
    "completion": "Answer: 2",
    "ground_truth": "2",
    "reward": 1.0,
    "correct": True,
    "response_length": 3,
    "finish_reason": "stop",
}


def open_recorder(run_dir: Path) -> Recorder:
    return Recorder(run_dir, RunConfig(run=RunSection(name=run_dir.name)))


def evaluation(step: int, name: str = "sums", **values: float) -> EvalResult:
    return EvalResult(step=step, policy_version=step, name=name, num_problems=1, num_samples=1, values=values)


def test_the_summary_holds_the_run_under_its_metric_names(finished_run: Path):
    summary = json.loads((finished_run / "summary.json").read_text())
    assert summary["run"] == "demo" and summary["status"] == "finished"
    assert [step["step"] for step in summary["steps"]] == list(range(1, 21))
    assert [e["step"] for e in summary["evaluations"] if e["name"] == "chained-sums"] == [0, 5, 10, 15, 20]
    assert summary["evaluations"][0]["values"]["num_problems"] == 256
    assert summary["timing_total"]["train"] == pytest.approx(
        sum(step["values"]["timing/train"] for step in summary["steps"])
    )
    assert summary["ledger"]["issued"] == sum(n for end, n in summary["ledger"].items() if end != "issued")
    assert summary["versions"]["rollout"]["vllm"] == "0.32.0"
    assert summary["config"]["trainer"]["num_steps"] == 20
    assert (finished_run / "report.html").samefile(summary["artifacts"]["report"])
    assert summary["duration_s"] > 0 and summary["started"] < summary["finished"]


def test_tokens_per_s_leaves_evaluations_and_checkpoints_out(run_dir: Path):
    recorder = open_recorder(run_dir)
    tokens = {"tokens/prompt": 40.0, "tokens/response": 60.0}
    recorder.record_step(1, {"timing/step": 2.0, **tokens})
    recorder.record_step(1, {"timing/evaluate": 10.0})
    recorder.record_step(1, {"timing/checkpoint": 1.0})
    recorder.record_step(2, {"timing/step": 3.0, **tokens})
    assert recorder.finish("finished", LEDGER).tokens_per_s == pytest.approx(40.0)


def test_a_run_without_steps_has_a_summary_and_a_report(run_dir: Path):
    summary = open_recorder(run_dir).finish("failed", dict.fromkeys(LEDGER, 0))
    assert summary.tokens_per_s is None and summary.steps == []
    assert "before its first evaluation" in (run_dir / "report.html").read_text()


def test_a_restarted_coordinator_continues_the_run(run_dir: Path):
    first = open_recorder(run_dir)
    first.record_eval(evaluation(0, accuracy=0.25), [ANSWER])
    first.record_step(1, {"reward/mean": 0.1, "timing/train": 1.0})
    first.record_step(2, {"reward/mean": 0.2, "timing/train": 1.0})
    second = open_recorder(run_dir)
    second.record_step(2, {"reward/mean": 0.3, "timing/train": 2.0})
    second.record_step(3, {"reward/mean": 0.4, "timing/train": 1.0})
    summary = second.finish("finished", LEDGER)
    assert [(s.step, s.values["reward/mean"]) for s in summary.steps] == [(1, 0.1), (2, 0.3), (3, 0.4)]
    assert summary.timing_total == {"train": 4.0}
    assert [(e.step, e.values["accuracy"]) for e in summary.evaluations] == [(0, 0.25)]


def test_an_evaluation_done_twice_counts_once(run_dir: Path):
    recorder = open_recorder(run_dir)
    recorder.record_eval(evaluation(5, accuracy=0.5), [ANSWER, {**ANSWER, "sample": 1}])
    recorder.record_eval(evaluation(5, accuracy=0.6), [ANSWER])
    summary = recorder.finish("finished", LEDGER)
    assert [(e.step, e.values["accuracy"]) for e in summary.evaluations] == [(5, 0.6)]
    assert len(read_completions(dump_path(run_dir / "evals", 5, "sums"))) == 1


def test_a_data_source_may_be_called_like_a_path(run_dir: Path):
    recorder = open_recorder(run_dir)
    recorder.record_eval(evaluation(0, "../openai/gsm8k", accuracy=0.5), [ANSWER])
    (dump,) = (run_dir / "evals").rglob("*.jsonl")
    assert dump.parent == run_dir / "evals" / "global_step_0"
    assert recorder.finish("finished", LEDGER).evaluations[0].name == "../openai/gsm8k"


def test_a_record_survives_a_killed_writer(run_dir: Path):
    """The writer tells of its last whole record, then dies by SIGKILL with half of the next one in the file."""
    script = """
        import sys
        from pathlib import Path
        from beamline.coordinator.metrics_file import MetricsFile
        file = MetricsFile(Path(sys.argv[1]))
        for step in range(1, 1000):
            file.log(step, 0.0, {"reward/mean": 0.5})
            print(step, flush=True)
            if step == 30:
                file.path.open("ab", buffering=0).write(b'{"step":31,"time":0.0,"val')
                print("half", flush=True)
                sys.stdin.read()
    """
    path = run_dir / "metrics.jsonl"
    command = [sys.executable, "-c", textwrap.dedent(script), str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        told = [line.strip() for line in iter(writer.stdout.readline, "half\n")]
        os.kill(writer.pid, signal.SIGKILL)
    assert [line.step for line in read_metrics(path)] == [int(step) for step in told]
    MetricsFile(path).log(31, 0.0, {"reward/mean": 0.5})
    assert [line.step for line in read_metrics(path)] == list(range(1, 32))


@pytest.mark.parametrize("length", range(0, 60, 7))
def test_a_file_cut_anywhere_keeps_its_whole_records(length: int, run_dir: Path):
    path = run_dir / "metrics.jsonl"
    file = MetricsFile(path)
    file.log(1, 1.5, {"a": 1.0})
    size = path.stat().st_size
    file.log(2, 2.5, {"a": 2.0})
    os.truncate(path, size + min(length, path.stat().st_size - size))
    MetricsFile(path).log(3, 3.5, {"a": 3.0})
    steps = [line.step for line in read_metrics(path)]
    assert steps in ([1, 3], [1, 2, 3])
    assert len(path.read_bytes().splitlines()) == len(steps)


def test_a_record_that_only_lacks_its_line_end_is_kept(run_dir: Path):
    path = run_dir / "metrics.jsonl"
    MetricsFile(path).log(1, 1.5, {"a": 1.0})
    os.truncate(path, path.stat().st_size - 1)
    MetricsFile(path).log(2, 2.5, {"a": 2.0})
    assert [line.step for line in read_metrics(path)] == [1, 2]


def test_a_damaged_line_is_named(run_dir: Path):
    path = run_dir / "metrics.jsonl"
    MetricsFile(path).log(1, 1.5, {"a": 1.0})
    path.write_bytes(b"nonsense\n" + path.read_bytes())
    with pytest.raises(ConfigError, match=r"metrics\.jsonl line 1 .* delete that line"):
        read_metrics(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused_by_name(value: float, run_dir: Path):
    recorder = open_recorder(run_dir)
    with pytest.raises(BeamlineError, match=r"policy/loss of step 7 is (nan|inf|-inf)"):
        recorder.record_step(7, {"reward/mean": 0.5, "policy/loss": value})
    with pytest.raises(BeamlineError, match=r"eval/sums/accuracy of step 7"):
        recorder.record_eval(evaluation(7, accuracy=value), [ANSWER])
    with pytest.raises(ConfigError, match="reward="):
        recorder.record_eval(evaluation(7, accuracy=0.5), [{**ANSWER, "reward": value}])
    assert read_metrics(run_dir / "metrics.jsonl") == []
    assert not (run_dir / "evals").exists()


def test_a_completion_with_an_unknown_field_is_refused(run_dir: Path):
    with pytest.raises(ConfigError, match="colour"):
        write_completions(run_dir / "sums.jsonl", [{**ANSWER, "colour": "red"}])


def test_what_is_not_a_summary_is_named(run_dir: Path):
    with pytest.raises(ConfigError, match=r"no .*summary\.json"):
        read_summary(run_dir / "summary.json")
    run_dir.mkdir()
    (run_dir / "summary.json").write_text('{"run": 3}')
    with pytest.raises(ConfigError, match=r"summary\.json is not the summary of a run"):
        read_summary(run_dir / "summary.json")


def test_loggers_are_told_what_is_on_disk(run_dir: Path):
    class Witness:
        def __init__(self) -> None:
            self.seen: list[tuple[int, dict[str, float]]] = []

        def log(self, step: int, time: float, values: dict[str, float]) -> None:
            assert read_metrics(run_dir / "metrics.jsonl")[-1].values == values
            self.seen.append((step, values))

    witness = Witness()
    Recorder(run_dir, RunConfig(), loggers=[witness]).record_step(1, {"reward/mean": 0.5})
    assert witness.seen == [(1, {"reward/mean": 0.5})]
