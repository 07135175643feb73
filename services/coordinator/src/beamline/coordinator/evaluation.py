"""Evaluations as groups of the same ring: one set of prompts at one policy version, and what came back."""

from collections.abc import Iterable

import msgspec

from beamline.algorithms.evaluation import summarise
from beamline.coordinator.cursor import Prompt
from beamline.coordinator.seeds import sample_seed
from beamline.protocol.config import EvalSet, SamplingSection
from beamline.protocol.messages import (
    EvalResult,
    FinishReason,
    GroupFailed,
    PromptGroup,
    Purpose,
    Sampling,
    ScoredGroup,
    Task,
)


class Evaluation:
    """One eval set at one policy version; a pure state machine. Results may come twice and in any order.

    Args:
        name: metric name, `eval/<name>/*`.
        prompts: the problems.
        groups: one a problem, in the same order.
        max_attempts: tries of a problem before it counts as failed.
        num_dropped: problems of the set that are not among them, for their prompts are too long.
    """

    def __init__(
        self, name: str, prompts: list[Prompt], groups: list[PromptGroup], max_attempts: int, num_dropped: int = 0
    ) -> None:
        self.name = name
        self.prompts = {group.group_id: prompt for group, prompt in zip(groups, prompts, strict=True)}
        self._max_attempts = max_attempts
        self._num_dropped = num_dropped
        self._waiting = {group.group_id: group for group in groups}
        self._groups = dict(self._waiting)
        self.scored: dict[str, ScoredGroup] = {}

    @property
    def complete(self) -> bool:
        return not self._waiting

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def sampling(self) -> Sampling:
        """How its groups are sampled."""
        return next(iter(self._groups.values())).sampling

    def waiting(self) -> list[PromptGroup]:
        """Attempts that are out."""
        return list(self._waiting.values())

    def group_ids(self) -> list[str]:
        return list(self._groups)

    def owns(self, group_id: str) -> bool:
        return group_id in self._groups

    def record(self, result: ScoredGroup | GroupFailed) -> PromptGroup | None:
        """Take a result. Returns the next attempt of a group that failed and may be tried again."""
        group = self._waiting.get(result.group_id)
        if group is None or result.attempt < group.attempt:
            return None
        if isinstance(result, GroupFailed) and result.retryable and result.attempt + 1 < self._max_attempts:
            retry = msgspec.structs.replace(group, attempt=result.attempt + 1)
            self._waiting[group.group_id] = retry
            return retry
        del self._waiting[group.group_id]
        if isinstance(result, ScoredGroup):
            self.scored[group.group_id] = result
        return None

    def result(self, step: int, seed: int) -> EvalResult:
        """Accuracy with its interval, pass@k, lengths. Abstained samples and failed problems are counted apart.

        An abstained sample is in no accuracy and no pass@k, but in the mean length and in what was truncated.
        """
        correct = [
            [grade.breakdown["acc"] == 1.0 for grade in scored.grades if grade.reward is not None]
            for scored in self.scored.values()
        ]
        lengths = [length for scored in self.scored.values() for length in scored.response_lengths]
        reasons = [reason for scored in self.scored.values() for reason in scored.finish_reasons]
        abstained = sum(grade.reward is None for scored in self.scored.values() for grade in scored.grades)
        group = next(iter(self._groups.values()))
        values = {
            **summarise([problem for problem in correct if problem], seed=seed),
            "mean_length": sum(lengths) / max(len(lengths), 1),
            "truncated": sum(reason is FinishReason.LENGTH for reason in reasons) / max(len(reasons), 1),
            "abstained": abstained / max(len(lengths), 1),
            "failed": float(len(self._groups) - len(self.scored)),
            "dropped": float(self._num_dropped),
        }
        return EvalResult(
            step=step,
            policy_version=group.min_policy_version,
            name=self.name,
            num_problems=len(self._groups),
            num_samples=len(group.seeds),
            values=values,
        )


def eval_groups(
    prompts: Iterable[Prompt],
    eval_set: EvalSet,
    sampling: SamplingSection,
    *,
    grader: str,
    environment: str = "",
    prefix: str,
    policy_version: int,
    seed: int,
    deadline: float,
    num_routed: int = 0,
) -> list[PromptGroup]:
    """One group a problem. Group ids are `<prefix>-<index>`; sample seeds do not depend on the policy version.

    The same seeds at every evaluation make two policies comparable problem by problem. The first `num_routed` groups
    keep their routes, unless they are greedy. What the set leaves open is as in training: `sampling`, `grader`,
    and so is the `environment`.
    """
    own_top_p = sampling.top_p if eval_set.top_p is None else eval_set.top_p
    return [
        PromptGroup(
            group_id=f"{prefix}-{index:05d}",
            attempt=0,
            purpose=Purpose.EVAL,
            task=Task(
                prompt_id=prompt.prompt_id,
                data_source=prompt.data_source,
                grader=eval_set.grader or grader,
                ground_truth=prompt.ground_truth,
                environment=environment,
            ),
            prompt_tokens=prompt.tokens,
            sampling=Sampling(
                temperature=eval_set.temperature,
                top_p=1.0 if eval_set.temperature == 0 else own_top_p,
                max_tokens=eval_set.max_response_tokens or sampling.max_response_tokens,
                stop=sampling.stop,
            ),
            seeds=[sample_seed(seed, f"eval/{prompt.prompt_id}", sample) for sample in range(eval_set.num_samples)],
            min_policy_version=policy_version,
            deadline=deadline,
            keep_routes=index < num_routed and eval_set.temperature > 0,
        )
        for index, prompt in enumerate(prompts)
    ]
