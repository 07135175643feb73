"""The calculator's sums, and what it does with what is no sum."""

from fractions import Fraction

import pytest

from beamline.environments.arithmetic import MAX_CHARS, evaluate
from beamline.environments.calculator import Calculator
from beamline.environments.environment import EpisodeTask, Step

TASK = EpisodeTask(prompt_id="p", data_source="sums", prompt="7-2+6", ground_truth="11", seed=0)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("7-2", 5),
        (" 7 - 2 + 6 ", 11),
        ("2+3*4", 14),
        ("(2+3)*4", 20),
        ("-3--4", 1),
        ("-(7-2)*3/4", Fraction(-15, 4)),
        ("10-2-3", 5),
        ("12/2/3", 2),
        ("007", 7),
        ("9" * 50 + "*" + "9" * 49, (10**50 - 1) * (10**49 - 1)),
    ],
)
def test_a_value_is_exact(expression: str, value: Fraction | int) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("", "expected a number, found the end"),
        ("7-", "expected a number, found the end"),
        ("7 2", "unexpected 2"),
        ("(7", "not closed"),
        ("7)", "unexpected \\)"),
        ("1/(2-2)", "division by zero"),
        ("2**3", "expected a number, found \\*"),
        ("__import__", "is no arithmetic"),
        ("1e9", "is no arithmetic"),
        ("1" * (MAX_CHARS + 1), "at most 100"),
    ],
)
def test_anything_else_is_refused(expression: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        evaluate(expression)


def test_nesting_is_bounded_by_the_length() -> None:
    assert evaluate("(" * 49 + "7" + ")" * 49) == 7
    assert evaluate("-" * 99 + "7") == -7


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("7-2=", Step(observation="5\n")),
        ("So the total is 5 + 6 =", Step(observation="11\n")),
        ("7-2=5\n5+6=", Step(observation="11\n")),
        ("7/2=", Step(observation="7/2\n")),
        ("7-=", Step(observation="error: expected a number, found the end\n")),
        ("x=", Step(observation="error: expected a number, found the end\n")),
        ("5/0=", Step(observation="error: division by zero\n")),
        ("Answer: 11", Step(done=True)),
        ("7-2=5", Step(done=True)),
        ("", Step(done=True)),
    ],
)
def test_a_turn_ends_in_a_call_or_is_the_last(text: str, step: Step) -> None:
    calculator = Calculator()
    assert calculator.reset(TASK).stop == ["="]
    assert calculator.step(text) == step
