"""Two runs side by side: which problems are paired, what is said about them, and what is refused."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from beamline.coordinator import cli
from beamline.coordinator.compare import MCNEMAR, PERMUTATION, Comparison, compare, pair
from beamline.coordinator.compare_figures import differing_settings
from beamline.coordinator.compare_sides import Problem, answers_of, read_side
from beamline.coordinator.compare_text import sentences
from beamline.coordinator.eval_dumps import Completion
from beamline.coordinator.recorder import Recorder
from beamline.protocol.config import OptimizerSection, RunConfig, RunSection, TrainerSection
from beamline.protocol.errors import ConfigError
from beamline.protocol.messages import EvalResult

LEDGER = {"issued": 0, "trained": 0, "filtered": 0, "stale": 0, "failed": 0}

type Counts = list[int | None]
"""Correct samples of each problem; None where all abstained."""


def completions(counts: Counts, *, samples: int = 4, prompt: str = "{}+0", truth: str = "{}") -> list[Completion]:
    return [
        Completion(
            prompt_id=f"sums/test/{problem}",
            sample=sample,
            prompt=prompt.format(problem),
            completion="Answer: 1",
            ground_truth=truth.format(problem),
            reward=None if count is None else 2.0 * (sample < count) - 1,
            correct=count is not None and sample < count,
            why="the grader was killed" if count is None else "",
            response_length=4,
            finish_reason="stop",
        )
        for problem, count in enumerate(counts)
        for sample in range(samples)
    ]


def record(folder: Path, name: str, dumps: dict[tuple[int, str], list[Completion]], *, lr: float = 1e-6) -> Path:
    """A run of two steps that evaluated what is given."""
    config = RunConfig(
        run=RunSection(name=name, dir=str(folder)), trainer=TrainerSection(optimizer=OptimizerSection(lr=lr))
    )
    recorder = Recorder(folder / name, config)
    for (step, evaluated), dump in sorted(dumps.items()):
        graded = [completion.correct for completion in dump if completion.reward is not None]
        accuracy = sum(graded) / len(graded)
        values = {"accuracy": accuracy, "accuracy_low": accuracy - 0.1, "accuracy_high": accuracy + 0.1}
        result = EvalResult(
            step=step, policy_version=step, name=evaluated, num_problems=len(dump), num_samples=1, values=values
        )
        recorder.record_eval(result, dump)
    for step in (1, 2):
        recorder.record_step(step, {"timing/step": 2.0, "policy/mismatch_abs_mean": 1e-6 * step, "policy/lr": lr})
    recorder.finish("finished", LEDGER)
    (folder / name / "launcher.lock").touch()
    return folder / name


def compared(folder: Path, first: dict[str, list[Completion]], second: dict[str, list[Completion]]) -> Comparison:
    runs = [("a", first), ("b", second)]
    folders = [record(folder, name, {(2, evaluated): dump for evaluated, dump in sets.items()}) for name, sets in runs]
    return compare(read_side("a", folders[0]), read_side("b", folders[1]))


def test_the_better_run_is_named_with_its_lead_whichever_comes_first(tmp_path: Path) -> None:
    low, high = {"sums": completions([1] * 40)}, {"sums": completions([2] * 30 + [1] * 10)}
    (said,) = sentences(compared(tmp_path, low, high))
    assert said.startswith("b is better on sums than a by 18.8 points (95 %: 15.")
    assert said.endswith(", p < 0.0001, paired over 40 problems).")
    (turned,) = sentences(compared(tmp_path / "turned", high, low))
    assert turned == said.replace("b is", "x is").replace("than a", "than b").replace("x is", "a is")


def test_what_could_be_chance_is_no_difference(tmp_path: Path) -> None:
    comparison = compared(
        tmp_path, {"sums": completions([1, 2, 3, 4, 0, 1])}, {"sums": completions([2, 2, 3, 3, 1, 2])}
    )
    (said,) = sentences(comparison)
    # Differences of 1, 0, 0, -1, 1, 1 quarters: their sum is at least 2 away from 0 for 10 of 16 tosses.
    assert said.startswith("No difference can be told on sums (b less a: 8.3 points, 95 %: ")
    assert said.endswith(", p = 0.62, paired over 6 problems).")
    (found,) = comparison.sets
    assert found.difference is not None and found.difference.p_value == pytest.approx(10 / 16)
    assert found.difference.test == PERMUTATION


def test_one_sample_a_problem_is_mcnemars_test(tmp_path: Path) -> None:
    first = {"greedy": completions([0] * 9 + [1] * 11, samples=1)}
    second = {"greedy": completions([1] * 8 + [0] + [1] * 10 + [0], samples=1)}
    (found,) = compared(tmp_path, first, second).sets
    assert found.difference is not None and found.difference.test == MCNEMAR
    assert found.difference.p_value == pytest.approx(2 * (1 + 9) / 2**9)  # 8 gained, 1 lost


def test_only_problems_that_both_have_graded_are_paired() -> None:
    first = answers_of(completions([4, 2, None, 0]))
    second = answers_of(completions([1, 2, 3]))
    assert first[Problem("2+0", "2")] == []
    shares = pair(first, second)
    assert [[float(share) for share in side] for side in shares] == [[1.0, 0.5], [0.25, 0.5]]


def test_a_problem_that_a_set_has_twice_counts_once() -> None:
    twice = [*completions([4, 0]), *completions([2])]
    assert [float(share) for share in pair(answers_of(twice), answers_of(twice))[0]] == [0.75, 0.0]


def test_sets_of_different_size_are_paired_where_they_meet(tmp_path: Path) -> None:
    (said,) = sentences(compared(tmp_path, {"sums": completions([1, 2, None, 0])}, {"sums": completions([1, 2, 3])}))
    assert said.endswith("paired over 2 problems, of 4 and 3).")


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (
            {"sums": completions([1, 2], prompt="{}*7")},
            "sums: the runs share no problem (a has 2, such as '0+0', b has 2, such as '0*7'); evaluate both on one "
            "file",
        ),
        ({"sums": completions([1, 2], truth="-{}")}, "sums: the same prompts have other ground truths in a than in b"),
        ({"sums": completions([None, 1])[:4]}, "sums: of the problems that both runs have, none was graded in both"),
        ({"aime": completions([1, 2])}, "b has not evaluated sums; a has not evaluated aime"),
    ],
    ids=["prompts", "truths", "abstained", "names"],
)
def test_runs_without_a_common_problem_are_refused_with_the_reason(
    tmp_path: Path, other: dict[str, list[Completion]], reason: str
) -> None:
    if reason.endswith("in both"):
        other = {
            "sums": [*other["sums"], *completions([1], prompt="{}?")]
        }  # an evaluation with no grade has no accuracy
    with pytest.raises(ConfigError) as error:
        compared(tmp_path, {"sums": completions([1, 2])}, other)
    assert str(error.value) == f"the runs cannot be compared: {reason}"


def test_a_set_of_one_run_does_not_hinder_the_others(tmp_path: Path) -> None:
    both, only = completions([1, 2]), completions([3, 4], prompt="{}*7")
    said = sentences(compared(tmp_path, {"aime": only, "sums": both}, {"sums": both}))
    assert said[0].startswith("No comparison on aime: b has not evaluated aime")
    assert said[1].startswith("No difference can be told on sums (b less a: 0.0 points, 95 %: 0.0 to 0.0, p = 1,")


def test_a_lost_dump_is_named(tmp_path: Path) -> None:
    folders = [record(tmp_path, name, {(2, "sums"): completions([1])}) for name in ("a", "b")]
    lost = folders[1] / "evals" / "global_step_2" / "sums.jsonl"
    lost.unlink()
    with pytest.raises(ConfigError, match=f"b has lost its completions of sums: {lost} is not there"):
        compare(*(read_side(folder.name, folder) for folder in folders))


def test_last_and_best_evaluation_are_told_apart(tmp_path: Path) -> None:
    dumps = {(step, "sums"): completions([count]) for step, count in ((0, 0), (5, 4), (10, 2))}
    side = read_side("a", record(tmp_path, "a", dumps))
    scores = compare(side, side).sets[0].first
    assert scores is not None
    assert (scores.final.step, scores.final.accuracy, scores.best.step, scores.best.accuracy) == (10, 0.5, 5, 1.0)


def test_settings_are_told_by_key_and_paths_by_what_they_are_in_the_run() -> None:
    def config(name: str, **more: Any) -> dict[str, Any]:
        data = {"train": f"/runs/{name}/data/sums.parquet", "evals": [{"path": "x", "num_samples": more["n"]}]}
        return {"run": {"name": name, "dir": "/runs"}, "data": data, "betas": [0.9, more["beta"]]}

    found = differing_settings(config("a", n=1, beta=0.95), config("b", n=8, beta=0.99) | {"new": 1})
    assert [(s.key, s.first, s.second) for s in found] == [
        ("data.evals.0.num_samples", 1, 8),
        ("betas", [0.9, 0.95], [0.9, 0.99]),
        ("new", None, 1),
    ]


def test_figures_and_asked_for_metrics(tmp_path: Path) -> None:
    runs = [record(tmp_path, name, {(2, "sums"): completions([1])}, lr=lr) for name, lr in (("a", 1e-6), ("b", 3e-6))]
    sides = [read_side(run.name, run) for run in runs]
    comparison = compare(*sides, ["policy/lr", "eval/sums/accuracy"])
    figures = {figure.name: (figure.first, figure.second) for figure in comparison.figures}
    assert figures["steps"] == (2, 2)
    assert figures["mismatch, mean of steps"] == pytest.approx((1.5e-6, 1.5e-6))
    assert figures["mismatch, largest step"] == (2e-6, 2e-6)
    assert figures["policy/lr, mean"] == pytest.approx((1e-6, 3e-6))
    assert figures["eval/sums/accuracy, last"] == (0.25, 0.25)
    assert [(s.key, s.first, s.second) for s in comparison.settings] == [("trainer.optimizer.lr", 1e-6, 3e-6)]
    with pytest.raises(ConfigError, match="--metric policy/lrr: neither run has recorded it; the nearest is policy/lr"):
        compare(*sides, ["policy/lrr"])


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        cli.main(["compare", *arguments])
    captured = capsys.readouterr()
    return int(end.value.code or 0), captured.out, captured.err


def test_the_command_prints_tables_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, lr, count in (("a", 1e-6, 1), ("b", 3e-6, 3)):
        record(tmp_path, name, {(2, "sums"): completions([count] * 12)}, lr=lr)
    code, shown, _ = command(capsys, "a", str(tmp_path / "b"), "--runs", str(tmp_path), "--metric", "policy/lr")
    assert code == 0
    assert shown.splitlines()[0].startswith(
        "b is better on sums than a by 50.0 points (95 %: 50.0 to 50.0, p = 0.00049"
    )
    rows = [line.split() for line in shown.splitlines()]
    assert ["sums", "a", "25.0", "%", "15.0", "%", "to", "35.0", "%", "2"] in [row[:10] for row in rows]
    assert ["sums", "50.0", "50.0", "to", "50.0", "0.00049", "12", "exact", "permutation", "test"] in rows
    assert ["trainer.optimizer.lr", "1e-06", "3e-06"] in rows
    assert ["policy/lr,", "last", "1e-06", "3e-06"] in rows
    code, shown, _ = command(capsys, "a", "b", "--runs", str(tmp_path), "--json")
    content = json.loads(shown)
    assert code == 0 and content["sentences"][0].startswith("b is better")
    assert content["sets"][0]["difference"]["p_value"] == pytest.approx(2**-11)
    assert msgspec.convert({k: v for k, v in content.items() if k != "sentences"}, Comparison).second == "b"


def test_the_command_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, "a", {(2, "sums"): completions([1])})
    assert command(capsys, "a", "a", "--runs", str(tmp_path))[0::2] == (
        2,
        f"beamline: {tmp_path / 'a'} is given twice: name two runs\n",
    )
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "launcher.lock").touch()
    code, _, error = command(capsys, "a", "b", "--runs", str(tmp_path))
    assert code == 2 and "name the folder of a run that has ended" in error
    record(tmp_path, "c", {(2, "sums"): completions([1])})
    dump = tmp_path / "c" / "evals" / "global_step_2" / "sums.jsonl"
    dump.write_bytes(dump.read_bytes() + b'{"prompt_id": 3}\n')
    code, _, error = command(capsys, "a", "c", "--runs", str(tmp_path))
    assert code == 2 and f"{dump} line 5 is not a completion" in error
