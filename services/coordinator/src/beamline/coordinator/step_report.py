"""The numbers of a step, under the names of docs/metrics.md. Pure functions."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean, pstdev

from opentelemetry import trace

from beamline.protocol.messages import CheckpointSaved, FinishReason, ScoredGroup

tracer = trace.get_tracer(__name__)


def group_metrics(step: int, groups: list[ScoredGroup]) -> dict[str, float]:
    """What the scored groups of a step say, the filtered ones included.

    Args:
        step: which turns policy step-1 into policy step.
        groups: the groups that were drawn for it.
    """
    grades = [grade for group in groups for grade in group.grades]
    rewards = [grade.reward for grade in grades if grade.reward is not None]
    lengths = [length for group in groups for length in group.response_lengths]
    reasons = [reason for group in groups for reason in group.finish_reasons]
    staleness = [step - 1 - group.min_policy_version for group in groups]
    solved = [any(grade.breakdown.get("acc") == 1.0 for grade in group.grades) for group in groups]
    abstentions = Counter(grade.abstention for grade in grades if grade.abstention)
    correct = [grade.breakdown["acc"] for grade in grades if "acc" in grade.breakdown]
    return {
        **_environment_metrics(groups),
        "reward/mean": fmean(rewards) if rewards else 0.0,
        "reward/std": pstdev(rewards) if rewards else 0.0,
        "reward/accuracy": fmean(correct) if correct else 0.0,
        "reward/pass_at_n": fmean(solved),
        "reward/abstained": float(len(grades) - len(rewards)),
        **{f"reward/abstained/{kind}": float(count) for kind, count in abstentions.items()},
        "tokens/prompt": float(sum(group.num_prompt_tokens * len(group.response_lengths) for group in groups)),
        "tokens/response": float(sum(lengths)),
        "tokens/response_mean": fmean(lengths),
        "tokens/response_max": float(max(lengths)),
        "tokens/truncated": fmean(reason is FinishReason.LENGTH for reason in reasons),
        "staleness/mean": fmean(staleness),
        "staleness/max": float(max(staleness)),
        "timing/generate_engine": max(group.generate_s for group in groups),
        "timing/score": sum(group.score_s for group in groups),
    }


def sampling_metrics(num_kept: int, num_filtered: int, groups_per_step: int) -> dict[str, float]:
    """What a batch cost: groups that were drawn for it, and those that ended without use."""
    return {
        "sampling/batches_drawn": (num_kept + num_filtered) / groups_per_step,
        "sampling/filtered_groups": float(num_filtered),
    }


def saved_metrics(saved: CheckpointSaved) -> dict[str, float]:
    """What the trainer says of a policy that it kept, or failed to keep."""
    size = {"checkpoint/num_bytes": float(saved.num_bytes)} if saved.path else {}
    return {"checkpoint/failed": float(bool(saved.error)), "checkpoint/save_s": saved.save_s, **size}


def _environment_metrics(groups: list[ScoredGroup]) -> dict[str, float]:
    """What there is to say where an environment answers the policy."""
    answered = [group for group in groups if group.task.environment]
    if not answered:
        return {}
    broken = [reason is FinishReason.ENVIRONMENT for group in answered for reason in group.finish_reasons]
    rewards = [
        grade.breakdown["environment"]
        for group in answered
        for grade in group.grades
        if "environment" in grade.breakdown
    ]
    mean = {"environment/reward_mean": fmean(rewards)} if rewards else {}
    return {"environment/broken": float(sum(broken)), **mean}


def throughput(values: Mapping[str, float]) -> dict[str, float]:
    """Tokens per second of generation and of the whole step, from the step's other numbers."""
    tokens = values["tokens/prompt"] + values["tokens/response"]
    return {
        "throughput/generate_tokens_per_s": values["tokens/response"] / max(values["timing/generate"], 1e-9),
        "throughput/tokens_per_s": tokens / max(values["timing/step"], 1e-9),
    }


class PhaseClock:
    """Seconds spent in each phase since `start`; a phase entered twice adds up."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.start()

    def start(self) -> None:
        """Begin anew."""
        self._begin = self._now()
        self._spent: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's time as `timing/<name>`, and show it as a span."""
        begin = self._now()
        try:
            with tracer.start_as_current_span(name):
                yield
        finally:
            self._spent[name] = self._spent.get(name, 0.0) + self._now() - begin

    def spent(self) -> dict[str, float]:
        """`timing/<phase>` for every phase that was entered."""
        return {f"timing/{name}": seconds for name, seconds in self._spent.items()}

    def total(self) -> float:
        """Seconds since `start`."""
        return self._now() - self._begin
