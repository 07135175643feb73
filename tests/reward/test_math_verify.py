"""The symbolic grader, in its process and in bulk."""

import pytest

from beamline.reward.math_verify_grader import grade


@pytest.mark.parametrize(
    ("text", "ground_truth", "acc"),
    [
        ("Answer: 1/2", "0.5", 1.0),
        (r"Answer: $\frac{2}{4}$", r"\frac12", 1.0),
        ("Answer: x + 1", "1+x", 1.0),
        (r"thus $\boxed{7}$.", "7", 1.0),
        (r"Answer: $\boxed{(1, 2)}$", "(1,2)", 1.0),
        (r"Answer: \$18.90", "18.9", 1.0),
        ("Answer: 0.33", "1/3", 0.0),
        ("Answer: 8", "7", 0.0),
        ("I give up", "7", 0.0),
        ("Answer: (", "7", 0.0),
        ("", "7", 0.0),
    ],
)
def test_equivalence(text, ground_truth, acc):
    verdict = grade(text, ground_truth)
    assert (verdict.acc, verdict.reward) == (acc, 2 * acc - 1)


async def test_a_formula_that_explodes_abstains(start_pool):
    """A power tower has no value that a computer can write down; the process is killed and the next one answers."""
    pool = await start_pool("math_verify", grade_timeout_s=2.0)
    tower, plain = await pool.grade(["Answer: $9^{9^{9^{9}}}$", "Answer: $3$"], "3")
    assert "no verdict within 2 s" in tower.why or "grading process" in tower.why
    assert plain.acc == 1.0
