"""Chained sums: short arithmetic that a tiny model can learn by reinforcement.

A problem is an expression such as 7-2+6+9; a solution writes each running total on its own line and
ends with `Answer: N`. A flawed solution has the right form and a bad habit: it may leave out the last
term or get a line wrong, which is what reinforcement learning then repairs.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from beamline.models.datasets import PromptRow, write_rows

DATA_SOURCE = "chained-sums"
INSTRUCTION = "Solve step by step and end with Answer: N."
FIRST_TERMS = range(2, 13)
STEP_SIZES = range(2, 10)
NUM_STEPS = (3, 4)
TOTALS = range(21)
EVAL_SEED, WARM_START_SEED, TRAIN_SEED = 101, 102, 103
MAX_EVAL_PROBLEMS = 1_024
NUM_WARM_START_PROBLEMS = 9_600


@dataclass(frozen=True)
class Problem:
    """A start and signed steps whose running totals all lie in `TOTALS`."""

    start: int
    steps: tuple[int, ...]

    @property
    def expression(self) -> str:
        return str(self.start) + "".join(f"{step:+d}" for step in self.steps)

    @property
    def answer(self) -> int:
        return self.start + sum(self.steps)

    @property
    def prompt(self) -> str:
        return f"{INSTRUCTION}\n{self.expression}"


@dataclass(frozen=True, kw_only=True)
class Flaws:
    """How often a solution goes wrong: shares in [0, 1].

    leave_out_last: the last step is missing, and the answer is the total before it.
    wrong_total: a line's total is off by one or two; later lines carry on from it.
    """

    leave_out_last: float
    wrong_total: float


NO_FLAWS = Flaws(leave_out_last=0.0, wrong_total=0.0)


def draw_problem(generator: random.Random) -> Problem:
    """One problem; steps are drawn uniformly from those that keep the running total in range."""
    start = total = generator.choice(FIRST_TERMS)
    steps = []
    for _ in range(generator.choice(NUM_STEPS)):
        step = generator.choice([s for size in STEP_SIZES for s in (size, -size) if total + s in TOTALS])
        steps.append(step)
        total += step
    return Problem(start, tuple(steps))


def distinct_problems(seed: int, number: int, exclude: Iterable[Problem] = ()) -> list[Problem]:
    """`number` different problems, none of them in `exclude`, the same for the same seed."""
    generator, seen = random.Random(seed), set(exclude)
    problems: list[Problem] = []
    while len(problems) < number:
        problem = draw_problem(generator)
        if problem not in seen:
            seen.add(problem)
            problems.append(problem)
    return problems


def solve(problem: Problem, flaws: Flaws = NO_FLAWS, generator: random.Random | None = None) -> str:
    """A solution's text, with `flaws` drawn from `generator` (needed only when there are any)."""
    generator = generator or random.Random(0)
    steps, total, lines = problem.steps, problem.start, []
    if generator.random() < flaws.leave_out_last:
        steps = steps[:-1]
    for step in steps:
        result = total + step
        if generator.random() < flaws.wrong_total:
            result = generator.choice([r for r in range(result - 2, result + 3) if r != result and r in TOTALS])
        lines.append(f"{total}{step:+d}={result}")
        total = result
    return "\n".join([*lines, f"Answer: {total}"])


def eval_problems(number: int = 256) -> list[Problem]:
    """The held-out problems: in neither `warm_start_problems` nor `train_problems`."""
    if number > MAX_EVAL_PROBLEMS:
        raise ValueError(
            f"{number} evaluation problems asked for, but only {MAX_EVAL_PROBLEMS} are held out: ask for fewer"
        )
    return distinct_problems(EVAL_SEED, number)


def warm_start_problems() -> list[Problem]:
    """The problems whose flawed solutions made the shipped models."""
    return distinct_problems(WARM_START_SEED, NUM_WARM_START_PROBLEMS, exclude=eval_problems(MAX_EVAL_PROBLEMS))


def train_problems(number: int = 5_000) -> list[Problem]:
    """Problems for reinforcement learning, new to a warm-started model."""
    held_out = [*eval_problems(MAX_EVAL_PROBLEMS), *warm_start_problems()]
    return distinct_problems(TRAIN_SEED, number, exclude=held_out)


def rows(problems: Iterable[Problem], split: str) -> Iterator[PromptRow]:
    """The problems as prompts with their answers."""
    for index, problem in enumerate(problems):
        yield PromptRow(
            data_source=DATA_SOURCE,
            messages=({"role": "user", "content": problem.prompt},),
            ground_truth=str(problem.answer),
            index=index,
            split=split,
        )


def write_parquet(directory: Path, num_train: int = 5_000, num_eval: int = 256) -> tuple[Path, Path]:
    """Write `train.parquet` and `eval.parquet` in DAPO's columns and return their paths.

    Raises ValueError if more evaluation problems are asked for than are held out.
    """
    return (
        write_rows(directory / "train.parquet", rows(train_problems(num_train), "train")),
        write_rows(directory / "eval.parquet", rows(eval_problems(num_eval), "eval")),
    )
