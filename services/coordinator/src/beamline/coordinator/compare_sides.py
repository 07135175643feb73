"""What a comparison reads of a run: its summary, and the graded samples of each set's last evaluation."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from beamline.coordinator.eval_dumps import Completion, dump_path, read_completions
from beamline.coordinator.summary import Summary, read_summary


class Problem(NamedTuple):
    """What makes two problems the same."""

    prompt: str
    ground_truth: str


type Answers = dict[Problem, list[bool]]
"""Whether each graded sample of a problem is correct; none for one whose samples have all abstained."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two runs."""

    name: str
    summary: Summary
    answers: dict[str, Answers]
    """By set."""
    missing: dict[str, Path]
    """Dumps that should be there, by set."""


def read_side(name: str, run_dir: Path) -> Side:
    """A run that has ended.

    Args:
        name: what the comparison calls it.

    Raises:
        ConfigError: a run without a summary, or a dump with a bad line.
    """
    summary = read_summary(run_dir / "summary.json")
    last = {evaluation.name: evaluation.step for evaluation in summary.evaluations}
    paths = {name: dump_path(run_dir / "evals", step, name) for name, step in last.items()}
    there = {name: path for name, path in paths.items() if path.is_file()}
    return Side(
        name=name,
        summary=summary,
        answers={name: answers_of(read_completions(path)) for name, path in there.items()},
        missing={name: path for name, path in paths.items() if name not in there},
    )


def answers_of(completions: list[Completion]) -> Answers:
    """Samples by problem; abstained ones are left out."""
    answers: Answers = {}
    for completion in completions:
        samples = answers.setdefault(Problem(completion.prompt, completion.ground_truth), [])
        if completion.reward is not None:
            samples.append(completion.correct)
    return answers
