"""The graders beside published answers and labels. docs/rewards.md tells what is asserted here."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from beamline.reward import gsm8k, math_dapo, math_verify_grader

PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"
GRADERS = {
    name: cache(grade)
    for name, grade in (
        ("math_dapo", math_dapo.grade),
        ("math_verify", math_verify_grader.grade),
        ("gsm8k", gsm8k.grade),
    )
}
"""Each text is graded once for all tests."""

SPELLINGS: dict[str, Callable[[str], str]] = {
    "boxed": lambda answer: f"So it is $\\boxed{{{answer}}}$.",
    "box after the label": lambda answer: f"Answer: $\\boxed{{{answer}}}$.",
    "answer": lambda answer: f"That is it.\nAnswer: {answer}",
    "dfrac": lambda answer: "Answer: $" + answer.replace("\\frac", "\\dfrac") + "$",
    "spaces": lambda answer: "Answer:  $ " + re.sub(r"([+=])", r" \1 ", answer) + " $ ",
    "period": lambda answer: f"Answer: ${answer}$.",
}
"""Ways to say an answer of MATH-500."""


def wrong(grader: str, rows: list[dict[str, str]], spelling: str) -> list[str]:
    """Answers that are not right beside themselves."""
    spell = SPELLINGS[spelling]
    return [row["answer"] for row in rows if GRADERS[grader](spell(row["answer"]), row["answer"]).acc != 1.0]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_answer_of_math_500_equals_itself_by_math_verify(published, spelling):
    assert wrong("math_verify", published("math-500.jsonl"), spelling) == []


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_answer_of_math_500_equals_itself_by_math_dapo_where_it_says_answer(published, spelling):
    rows = published("math-500.jsonl")
    missed = wrong("math_dapo", rows, spelling)
    # Its rule reads nothing but `Answer: ...`.
    assert missed == ([row["answer"] for row in rows] if spelling == "boxed" else [])


@pytest.mark.parametrize("name", ["aime-2024.jsonl", "aime-2025.jsonl"])
def test_leading_zeros_of_competition_answers(published, name):
    """By math_verify 033 is 33, both ways; math_dapo compares texts."""
    for answer in (row["answer"] for row in published(name)):
        short = str(int(answer))
        for said, truth in ((answer, short), (short, answer), (answer, answer)):
            assert GRADERS["math_verify"](f"Answer: {said}", truth).acc == 1.0
            assert GRADERS["math_dapo"](f"Answer: {said}", truth).acc == float(said == truth)


def test_gsm8k_agrees_with_the_labels_of_real_solutions(published):
    rows = published("gsm8k-graded-solutions.jsonl")
    differ = [row for row in rows if GRADERS["gsm8k"](row["solution"], row["ground_truth"]).acc != row["is_correct"]]
    assert len(rows) == 1320
    assert differ == []


@pytest.mark.parametrize("grader", ["math_dapo", "math_verify"])
def test_the_math_graders_agree_with_the_labels_where_solutions_say_answer(published, grader):
    """Real solutions end in `A: N` or `#### N`."""
    rows = published("gsm8k-graded-solutions.jsonl")
    texts = [re.sub(r"(?m)^\s*(?:A:|####)", "Answer:", row["solution"]) for row in rows]
    grade = GRADERS[grader]
    differ = [
        text for text, row in zip(texts, rows, strict=True) if grade(text, row["ground_truth"]).acc != row["is_correct"]
    ]
    assert differ == []


@pytest.mark.parametrize("name", ["gsm8k-train.jsonl", "gsm8k-test.jsonl"])
def test_every_published_worked_answer_of_gsm8k_is_right(published, name):
    answers = [row["answer"] for row in published(name)]
    assert [a for a in answers if gsm8k.grade(a, a.rpartition("####")[2].strip()).acc != 1.0] == []
    assert [a for a in answers if gsm8k.grade(a, a).acc != 1.0] == []


def cells(heading: str) -> list[list[str]]:
    """Rows of the table under a heading of docs/rewards.md, without its head; code spans lose their marks."""
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_the_page_tells_how_often_the_math_graders_agree_with_labels(published):
    """Texts, and how many verdicts are as labelled; of MATH-500 every answer is right beside itself."""
    solutions, problems = published("gsm8k-graded-solutions.jsonl"), published("math-500.jsonl")
    labelled = [(row["solution"], row["ground_truth"], row["is_correct"]) for row in solutions]
    renamed = [(re.sub(r"(?m)^\s*(?:A:|####)", "Answer:", text), truth, label) for text, truth, label in labelled]
    sets = {"GSM8K solutions, as they are": labelled, "GSM8K solutions, `Answer:` for `A:` and `####`": renamed}
    for name, spell in SPELLINGS.items():
        sets[f"MATH-500, {name}"] = [(spell(row["answer"]), row["answer"], True) for row in problems]
    found = [[name, str(len(rows)), *(str(agreed(grader, rows)) for grader in GRADERS)] for name, rows in sets.items()]
    found = [row if row[0].startswith("GSM8K") else [*row[:4], "-"] for row in found]
    assert [[cell.replace("`", "") for cell in row] for row in cells("The math graders beside labels")] == [
        [cell.replace("`", "") for cell in row] for row in found
    ]


def agreed(grader: str, rows: list[tuple[str, str, bool]]) -> int:
    """How many verdicts are as labelled; a ground truth that a grader cannot read has none."""
    num_agreed = 0
    for text, truth, label in rows:
        try:
            num_agreed += GRADERS[grader](text, truth).acc == label
        except ValueError:
            continue
    return num_agreed


def test_the_page_tells_where_the_math_graders_differ():
    """Every row of its table is graded here; some of them are where the two agree."""
    rows = cells("Where the math graders differ")
    assert len(rows) > 20
    for answer, truth, by_dapo, by_verify, why in rows:
        for grader, told in (("math_dapo", by_dapo), ("math_verify", by_verify)):
            acc = GRADERS[grader](f"Answer: {answer}", truth).acc
            assert {1.0: "right", 0.0: "wrong"}[acc] == told, (grader, answer, truth)
        assert why
