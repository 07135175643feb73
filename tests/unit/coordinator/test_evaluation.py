"""Evaluations as groups of the ring: how they are sampled and graded, and what their results come to."""

import json
from pathlib import Path
from typing import cast

import msgspec
import pytest

from beamline.coordinator.core import Core
from beamline.coordinator.cursor import Problems, Prompt
from beamline.coordinator.evaluation import Evaluation, eval_groups
from beamline.coordinator.evaluator import Evaluator
from beamline.coordinator.prompts import eval_prompts
from beamline.models.dataset_preparation import prepare
from beamline.models.datasets import PromptRow
from beamline.protocol.config import DataSection, EvalSet, SamplingSection
from beamline.protocol.errors import ConfigError
from beamline.protocol.messages import FinishReason, PromptGroup, Purpose
from ring_messages import failed, scored

SAMPLING = SamplingSection(max_response_tokens=64, temperature=0.7, top_p=0.9)
PROMPTS = [Prompt(f"sums/test/{i}", "sums", str(i), [1, 2, i], f"{i}+0") for i in range(4)]


def groups_of(eval_set: EvalSet, policy_version: int = 3) -> list[PromptGroup]:
    return eval_groups(
        PROMPTS,
        eval_set,
        SAMPLING,
        grader="math_dapo",
        prefix=f"e1-{policy_version}",
        policy_version=policy_version,
        seed=5,
        deadline=1e12,
    )


def evaluation(num_samples: int = 2) -> tuple[Evaluation, list[PromptGroup]]:
    groups = groups_of(EvalSet(path="x", num_samples=num_samples))
    return Evaluation("sums", PROMPTS, groups, max_attempts=2), groups


def test_a_set_is_sampled_as_it_says_and_else_as_in_training():
    left_open = groups_of(EvalSet(path="x"))[0]
    assert (left_open.sampling.temperature, left_open.sampling.top_p, left_open.sampling.max_tokens) == (1.0, 0.9, 64)
    assert left_open.task.grader == "math_dapo" and left_open.purpose is Purpose.EVAL
    own = groups_of(EvalSet(path="x", temperature=0.6, top_p=0.95, max_response_tokens=512, grader="math_verify"))[0]
    assert (own.sampling.temperature, own.sampling.top_p, own.sampling.max_tokens) == (0.6, 0.95, 512)
    assert own.task.grader == "math_verify"
    assert groups_of(EvalSet(path="x", temperature=0, num_samples=1))[0].sampling.top_p == 1.0


def problems_of(path: Path, name: str = "") -> dict[str, Problems]:
    def tokenize(row: PromptRow) -> Prompt:
        return Prompt(f"{row.data_source}/{row.index}", row.data_source, row.ground_truth, [1, 2])

    return eval_prompts(EvalSet(path=str(path), name=name), DataSection(), tokenize)


def test_metrics_are_called_after_the_set_or_its_data_source(tmp_path: Path):
    """AIME 2025 by its own name, AIME 2024 by the grader's, as in its published file."""
    for year in (2024, 2025):
        (tmp_path / f"{year}.jsonl").write_text(json.dumps({"problem": f"What is {year}?", "answer": "7"}) + "\n")
        prepare(f"aime-{year}", tmp_path / f"{year}.jsonl", tmp_path)
    files = {file.name.removesuffix("-cleaned.parquet"): file for file in tmp_path.glob("*.parquet")}
    assert list(problems_of(files["aime-2025"])) == ["aime-2025"]
    assert list(problems_of(files["aime-2024"])) == ["math_dapo"]
    assert list(problems_of(files["aime-2024"], name="aime-2024")) == ["aime-2024"]
    core = cast(Core, None)  # nothing is evaluated
    sets = [(EvalSet(path="x"), problems_of(files["aime-2024"])), (EvalSet(path="y"), problems_of(files["aime-2024"]))]
    with pytest.raises(ConfigError, match="2 sets are recorded as eval/math_dapo/"):
        Evaluator(core, sets, lambda result, completions: None)


def test_every_policy_is_sampled_with_the_same_seeds():
    eval_set = EvalSet(path="x", num_samples=3)
    first, later = groups_of(eval_set, policy_version=0), groups_of(eval_set, policy_version=20)
    assert [group.seeds for group in first] == [group.seeds for group in later]
    assert len({seed for group in first for seed in group.seeds}) == 4 * 3


def test_a_result_by_hand():
    """Right, half right, abstained once, failed."""
    run, groups = evaluation()
    run.record(scored(groups[0], [1.0, 1.0], lengths=[4, 6]))
    run.record(scored(groups[1], [1.0, -1.0], lengths=[8, 2]))
    half = scored(groups[2], [None, -1.0], lengths=[64, 6])
    run.record(msgspec.structs.replace(half, finish_reasons=[FinishReason.LENGTH, FinishReason.STOP]))
    assert not run.complete
    run.record(failed(groups[3], retryable=False))
    assert run.complete
    result = run.result(step=3, seed=0)
    assert (result.num_problems, result.num_samples, result.policy_version) == (4, 2, 3)
    values = result.values
    assert values["accuracy"] == values["pass_at_1"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert "pass_at_2" not in values, "one problem has a single graded sample"
    assert values["mean_length"] == pytest.approx((4 + 6 + 8 + 2 + 64 + 6) / 6)
    assert values["truncated"] == values["abstained"] == pytest.approx(1 / 6)
    assert values["failed"] == 1


def test_an_abstained_sample_is_neither_right_nor_wrong():
    """A problem with nothing but abstentions leaves the accuracy as if it were not there."""
    run, groups = evaluation()
    run.record(scored(groups[0], [1.0, None]))
    run.record(scored(groups[1], [None, None]))
    values = run.result(step=0, seed=0).values
    assert values["accuracy"] == 1.0
    assert values["abstained"] == 3 / 4
    assert values["failed"] == 2, "two problems have not been answered"


def test_nothing_but_abstentions_has_no_accuracy():
    run, groups = evaluation(num_samples=1)
    for group in groups:
        run.record(scored(group, [None]))
    values = run.result(step=0, seed=0).values
    assert "accuracy" not in values and values["abstained"] == 1.0 and values["failed"] == 0


def test_a_failed_problem_is_tried_again_and_old_answers_do_not_count():
    run, groups = evaluation()
    retry = run.record(failed(groups[0], retryable=True))
    assert retry is not None and retry.attempt == 1 and retry.seeds == groups[0].seeds
    assert run.record(failed(groups[0], retryable=True)) is None, "the first attempt's failure came twice"
    assert run.num_waiting == 4
    assert run.record(failed(retry, retryable=True)) is None, "no third attempt"
    assert run.num_waiting == 3
