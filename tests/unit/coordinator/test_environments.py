"""What the coordinator says of an environment: to the groups that it issues, and in a step's numbers."""

from collections.abc import Callable

import msgspec
import pytest

from beamline.coordinator.cursor import Prompt
from beamline.coordinator.evaluation import eval_groups
from beamline.coordinator.step_report import group_metrics
from beamline.protocol.config import EvalSet, RunConfig, SamplingSection
from beamline.protocol.messages import FinishReason, Grade, ScoredGroup
from ring_messages import prompt, scored

PROMPTS = [Prompt("sums/test/0", "sums", "5", [1, 2, 3], "3+2")]


def test_evaluated_groups_name_the_environment_and_the_stop_texts() -> None:
    (group,) = eval_groups(
        PROMPTS,
        EvalSet(path="x"),
        SamplingSection(stop=["\n\n"]),
        grader="math_dapo",
        environment="calculator",
        prefix="e1",
        policy_version=0,
        seed=5,
        deadline=1e12,
    )
    assert (group.task.environment, group.sampling.stop) == ("calculator", ["\n\n"])


def played(number: int, given: list[float | None]) -> ScoredGroup:
    """A group of which the environment gave so much; None where it broke."""
    group = scored(prompt(number), given)
    return msgspec.structs.replace(
        group,
        task=msgspec.structs.replace(group.task, environment="calculator"),
        finish_reasons=[FinishReason.ENVIRONMENT if reward is None else FinishReason.STOP for reward in given],
        grades=[
            Grade(reward=None, breakdown={})
            if reward is None
            else Grade(reward=reward, breakdown={"raw": reward, "acc": 0.0, "environment": reward})
            for reward in given
        ],
    )


def test_what_broke_and_what_was_given_is_counted(is_documented: Callable[[str], bool]) -> None:
    values = group_metrics(1, [played(0, [0.5, None]), played(1, [1.0, 0.0])])
    assert (values["environment/broken"], values["environment/reward_mean"]) == (1.0, 0.5)
    assert [name for name in values if not is_documented(name)] == []


def test_a_run_without_an_environment_has_no_such_numbers() -> None:
    assert [name for name in group_metrics(1, [scored(prompt(0), [1.0, -1.0])]) if "environment" in name] == []


@pytest.mark.parametrize("name", ["calculator", "my.package:Game", ""])
def test_an_environment_is_named_as_in_the_document(name: str) -> None:
    assert msgspec.convert({"rollout": {"environment": {"name": name}}}, RunConfig).rollout.environment.name == name


def test_a_name_that_is_none_is_refused_by_the_nearest() -> None:
    with pytest.raises(msgspec.ValidationError, match="'calculater' does not exist: did you mean 'calculator'"):
        msgspec.convert({"rollout": {"environment": {"name": "calculater"}}}, RunConfig)
