"""The graders `gsm8k`, `exact` and `regex`: which answer they read, and what they make of it."""

import time

import pytest

from beamline.protocol.reward_config import GRADERS, RewardSection
from beamline.reward import exact, gsm8k, regex
from beamline.reward.frames import Abstained
from beamline.reward.grader import load_grader


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2+3=<<2+3=5>>5\n#### 5", "5"),
        ("A: 5", "5"),
        ("Answer: 5 apples", "5"),
        ("**Answer:** $1,234.50", "1234.5"),
        (r"thus $\boxed{1{,}234}$ in all", "1234"),
        (r"Answer: $\boxed{5}$ of 7", "5"),
        ("#### 4\nA: 5", "5"),
        ("Answer: 4\n#### 5", "5"),
        ("Answer: 2 + 3 = 5", "5"),
        ("#### -5", "-5"),
        ("#### \u22125%", "-5"),
        ("#### -$5", "-5"),
        ("#### 7/14", "0.5"),
        ("#### .5", "0.5"),
        ("#### 05.00", "5"),
        ("#### 12,34", "12"),
        ("ANSWER:\n5", "5"),
        ("5", ""),
        ("banana: 5", ""),
        ("#### none", ""),
        ("#### 1/0", ""),
        ("#### " + "9" * 5000, ""),
        ("", ""),
    ],
)
def test_the_number_that_gsm8k_reads(text, number):
    verdict = gsm8k.grade(text, number or "5")
    assert (verdict.pred, verdict.acc) == (number, float(bool(number)))
    assert verdict.reward == 2 * verdict.acc - 1


@pytest.mark.parametrize("ground_truth", ["5", "5.0", "$5", "Add 2 and 3.\n#### 5"])
def test_a_ground_truth_of_gsm8k_is_a_number_or_a_worked_answer(ground_truth):
    assert gsm8k.grade("A: 5", ground_truth).acc == 1.0
    assert gsm8k.grade("A: 6", ground_truth).acc == 0.0


@pytest.mark.parametrize(
    ("text", "acc"),
    [
        ("the  red\n fox", 1.0),
        ("It is here.\nAnswer: the red   fox\nbye", 1.0),
        ("Answer: the Red fox", 0.0),
        ("Answer: the red fox.", 0.0),
        ("", 0.0),
    ],
)
def test_exact_compares_words(text, acc):
    assert exact.grade(text, " the red fox ").acc == acc


@pytest.mark.parametrize(
    ("text", "acc"),
    [("Answer: 12 km", 1.0), ("12 km", 1.0), ("12 kmh", 0.0), ("about 12 km", 0.0), ("Answer: x\nAnswer: 1 km", 1.0)],
)
def test_regex_matches_all_of_the_answer(text, acc):
    assert regex.grade(text, r"\d+\s*km").acc == acc


@pytest.mark.parametrize(
    ("grade", "ground_truth", "words"),
    [
        (gsm8k.grade, "five", "ground truth 'five' has no number"),
        (gsm8k.grade, "", "ground truth '' has no number"),
        (exact.grade, " ", "the ground truth is empty"),
        (regex.grade, "", "the ground truth is empty"),
        (regex.grade, "(", "'(' is not a regular expression"),
    ],
)
def test_a_ground_truth_that_cannot_be_read_is_an_error(grade, ground_truth, words):
    with pytest.raises(ValueError) as error:
        grade("Answer: 5", ground_truth)
    assert words in str(error.value)


async def test_an_expression_that_takes_for_ever_abstains(start_pool):
    pool = await start_pool("regex", grade_timeout_s=0.5)
    endless, after = await pool.grade(["a" * 40 + "!", "aaa"], "(a+)+")
    assert isinstance(endless, Abstained)
    assert endless.kind == "timeout"
    assert after.acc == 1.0


def test_hostile_text_is_read_at_once():
    started = time.process_time()
    for text in (
        "####" * 50_000,
        "A: " * 50_000,
        "#### " + "1," * 50_000,
        "#### -" + " " * 50_000,
        "Answer: " * 50_000,
    ):
        assert gsm8k.grade(text, "7").acc == 0.0
        assert exact.grade(text, "7").acc == 0.0
    assert time.process_time() - started < 2.0


def test_every_name_is_a_grader():
    for name in GRADERS:
        assert callable(load_grader(name, RewardSection()))
