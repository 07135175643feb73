"""The text grader: where it reads the answer, how it spells it, and whether it agrees with published labels."""

import time

import pytest

from beamline.reward.math_dapo import TAIL_CHARS, grade, last_answer, normalise


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("7-2=5\nAnswer: 5", "5"),
        ("Answer: 4\nno, Answer: 5\n", "5"),
        ("answer :5", "5"),
        ("ANSWER: 5 apples\nthat is all", "5 apples"),
        ("**Answer:** 5", "5"),
        ("**Answer: 5**", "5**"),
        ("Answer:\n5", "5"),
        ("Answer: 5\nAnswer:   ", "5"),
        ("the answer is 5", ""),
        ("", ""),
        ("Answer: 5" + "." * TAIL_CHARS, ""),
        ("Answer: 5" + "." * (TAIL_CHARS - 9), "5" + "." * (TAIL_CHARS - 9)),
    ],
)
def test_the_last_answer_near_the_end_is_read(text, answer):
    assert last_answer(text) == answer


@pytest.mark.parametrize(
    ("spelled", "plain"),
    [
        ("x = 5", "5"),
        ("$x = 5$", "5"),
        (r"\boxed{5}", "5"),
        (r"$\boxed{x=5}$.", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{5", "5"),
        ("an apple", "apple"),
        ("the number 5", "number5"),
        ("a + b", "a+b"),
        ("5 dollars", "5"),
        (r"\$5", "5"),
        ("$5", "5"),
        ("5 square units", "5"),
        (r"15\mbox{ cm}^2", "15"),
        (r"15 \text{ hours}", "15"),
        (r"90^\circ", "90"),
        ("50%", "50"),
        (r"50\%", "50"),
        (r"\text{Evelyn}", "Evelyn"),
        ("ways", "ways"),
        ("always", "always"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        (r"\frac 1{2}", r"\frac{1}{2}"),
        ("1/2", r"\frac{1}{2}"),
        (r"\sqrt2", r"\sqrt{2}"),
        (r"2 \sqrt{5}", r"2\sqrt{5}"),
        ("1,234", "1234"),
        (r"10,\!080", "10080"),
        ("1{,}234{,}567.50", "1234567.50"),
        ("1,2,3", "1,2,3"),
        ("(1,000)", "(1,000)"),
        ("033", "033"),
        ("\u22127", "-7"),
        ("18.00", "18.00"),
        ("0.5", "0.5"),
        ("5.", "5"),
        ("**5**", "5"),
        ("0", "0"),
        ("", ""),
    ],
)
def test_spellings_of_one_answer(spelled, plain):
    assert normalise(spelled) == plain
    assert normalise(plain) == plain


def test_rewards_are_plus_and_minus_one():
    right, wrong, none = grade("Answer: 5", "5"), grade("Answer: 6", "5"), grade("5", "5")
    assert (right.reward, right.acc, right.pred) == (1.0, 1.0, "5")
    assert (wrong.reward, wrong.acc, wrong.pred) == (-1.0, 0.0, "6")
    assert (none.reward, none.acc, none.pred) == (-1.0, 0.0, "")


def test_no_answer_is_never_right():
    assert grade("I give up", "").acc == 0.0
    assert grade("Answer: $", "").acc == 0.0


def test_hostile_text_is_graded_at_once():
    started = time.process_time()
    for text in (
        "Answer:" * 100_000,
        "Answer: " + r"\boxed{" * 50,
        "Answer: " + r"\frac{" * 50,
        "Answer: " + " " * 290,
    ):
        assert grade(text, "5").acc == 0.0
    assert time.process_time() - started < 1.0


def test_different_published_integers_are_never_confused(published):
    answers = {row["answer"] for row in published("math-500.jsonl") if row["answer"].isdecimal()}
    assert len(answers) > 100
    right = [(a, b) for a in answers for b in answers if grade(f"Answer: {a}", b).acc]
    assert all(a == b for a, b in right)
