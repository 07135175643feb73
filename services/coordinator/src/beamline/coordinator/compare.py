"""Two runs side by side: settings that differ, accuracies with the significance of their difference, other figures.

Pure functions over what the runs have left; `compare_sides` reads it, `compare_text` says it.
"""

from collections.abc import Sequence
from fractions import Fraction

import msgspec

from beamline.algorithms.significance import paired_difference
from beamline.coordinator.compare_figures import Figure, Setting, differing_settings, figures
from beamline.coordinator.compare_sides import Answers, Problem, Side
from beamline.coordinator.summary import Evaluation, Summary
from beamline.protocol.errors import ConfigError

PERMUTATION = "exact permutation test"
MCNEMAR = "exact McNemar test"
"""What the permutation test is where every problem has one sample."""
SIGNIFICANCE = 0.05
SEED = 0
"""Of the bootstrap."""


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the parts of a comparison."""


class Score(_Record, frozen=True, kw_only=True):
    """Of one evaluation of all its problems, as it was recorded."""

    step: int
    accuracy: float
    low: float
    high: float


class Scores(_Record, frozen=True, kw_only=True):
    """Of one set over a run."""

    final: Score
    best: Score


class Difference(_Record, frozen=True, kw_only=True):
    """Accuracy of the second run less the first's at the last evaluations, over the problems that both have graded."""

    num_problems: int
    num_first: int
    """Problems that the first run has evaluated."""
    num_second: int
    mean: float
    low: float
    """Lower end of its 95 % bootstrap interval."""
    high: float
    p_value: float
    test: str

    @property
    def significant(self) -> bool:
        return self.p_value < SIGNIFICANCE


class SetComparison(_Record, frozen=True, kw_only=True):
    """One evaluated set. `why_not` says why there is no difference to be told."""

    name: str
    first: Scores | None
    second: Scores | None
    difference: Difference | None
    why_not: str = ""


class Comparison(_Record, frozen=True, kw_only=True):
    first: str
    second: str
    settings: list[Setting]
    sets: list[SetComparison]
    figures: list[Figure]


def compare(first: Side, second: Side, metrics: Sequence[str] = ()) -> Comparison:
    """Compare two runs.

    Args:
        metrics: names of docs/metrics.md to compare beside the usual figures: mean over the steps, and the last value.

    Raises:
        ConfigError: a metric that neither run has, or runs that have both evaluated and share no problem.
    """
    names = list(dict.fromkeys([*_names(first.summary), *_names(second.summary)]))
    sets = [_compare_set(name, first, second) for name in names]
    if all(_names(side.summary) for side in (first, second)) and not any(found.difference for found in sets):
        raise ConfigError("the runs cannot be compared: " + "; ".join(found.why_not for found in sets))
    return Comparison(
        first=first.name,
        second=second.name,
        settings=differing_settings(first.summary.config, second.summary.config),
        sets=sets,
        figures=figures(first.summary, second.summary, metrics),
    )


def pair(first: Answers, second: Answers) -> tuple[list[Fraction], list[Fraction]]:
    """Accuracies of the problems that both have graded, in the same order.

    A problem is its prompt with its ground truth, whatever file it lies in; samples of one that a set has twice count
    together. Abstained samples count neither as right nor as wrong.
    """
    shared = [problem for problem in first if problem in second]
    graded = [problem for problem in shared if first[problem] and second[problem]]
    return [_share(first[problem]) for problem in graded], [_share(second[problem]) for problem in graded]


def _compare_set(name: str, first: Side, second: Side) -> SetComparison:
    scores = [_scores(side.summary, name) for side in (first, second)]
    difference, why_not = _difference(name, first, second)
    return SetComparison(name=name, first=scores[0], second=scores[1], difference=difference, why_not=why_not)


def _difference(name: str, first: Side, second: Side) -> tuple[Difference | None, str]:
    """The difference of a set, or why there is none."""
    for side in (first, second):
        if name not in side.answers:
            if name in _names(side.summary):
                return None, f"{side.name} has lost its completions of {name}: {side.missing[name]} is not there"
            return None, f"{side.name} has not evaluated {name}"
    answers = first.answers[name], second.answers[name]
    shares = pair(*answers)
    if not shares[0]:
        return None, _no_pairs(name, first, second)
    found = paired_difference(*shares, seed=SEED)
    single = all(len(samples) <= 1 for side in answers for samples in side.values())
    return (
        Difference(
            num_problems=len(shares[0]),
            num_first=len(answers[0]),
            num_second=len(answers[1]),
            mean=found.mean,
            low=found.low,
            high=found.high,
            p_value=found.p_value,
            test=MCNEMAR if single else PERMUTATION,
        ),
        "",
    )


def _no_pairs(name: str, first: Side, second: Side) -> str:
    answers = first.answers[name], second.answers[name]
    if answers[0].keys() & answers[1].keys():
        return f"{name}: of the problems that both runs have, none was graded in both"
    prompts = [{problem.prompt for problem in side} for side in answers]
    if prompts[0] & prompts[1]:
        return f"{name}: the same prompts have other ground truths in {first.name} than in {second.name}"
    told = [
        f"{side.name} has {len(problems)}, such as {_short(next(iter(problems)))}"
        for side, problems in zip((first, second), answers, strict=True)
    ]
    return f"{name}: the runs share no problem ({', '.join(told)}); evaluate both on one file"


def _short(problem: Problem) -> str:
    words = " ".join(problem.prompt.split())
    return repr(words if len(words) <= 60 else f"…{words[-60:]}")


def _share(samples: Sequence[bool]) -> Fraction:
    return Fraction(sum(samples), len(samples))


def _names(summary: Summary) -> list[str]:
    return list(dict.fromkeys(evaluation.name for evaluation in summary.evaluations))


def _scores(summary: Summary, name: str) -> Scores | None:
    found = [_score(e) for e in summary.evaluations if e.name == name and "accuracy" in e.values]
    if not found:
        return None
    return Scores(final=found[-1], best=max(found, key=lambda score: score.accuracy))


def _score(evaluation: Evaluation) -> Score:
    values = evaluation.values
    low, high = values["accuracy_low"], values["accuracy_high"]
    return Score(step=evaluation.step, accuracy=values["accuracy"], low=low, high=high)
