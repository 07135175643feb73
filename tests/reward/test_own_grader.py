"""A grader of a user's own, as docs/rewards.md tells it and examples/own_grader.py has it."""

import re
from pathlib import Path

import pytest

from beamline.reward.frames import Abstained

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "rewards.md"


@pytest.fixture(autouse=True)
def _from_the_checkout(monkeypatch):
    """The reward service imports from the folder in which a run was started."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


async def test_the_example_grades_in_the_pool(start_pool):
    pool = await start_pool("examples.own_grader:grade")
    right, wrong, none = await pool.grade(["Answer: 5", "Answer: 6", "5"], "5")
    assert (right.acc, wrong.acc, none.acc) == (1.0, 0.0, 0.0)
    assert right.reward > wrong.reward > none.reward
    (abstained,) = await pool.grade(["Answer: 5"], "five")
    assert isinstance(abstained, Abstained)
    assert "grader raised ValueError" in abstained.why


async def test_the_page_s_example_grades_in_the_pool(start_pool, monkeypatch, tmp_path):
    (code,) = re.findall(r"```python\n(from beamline.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "my_graders.py").write_text(code, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pool = await start_pool("my_graders:shorter_than")
    short, long, unreadable = (
        (await pool.grade(["one two"], "3"))
        + (await pool.grade(["a b c d"], "3"))
        + (await pool.grade(["one"], "three"))
    )
    assert (short.reward, short.acc, short.pred) == (1.0, 1.0, "2 words")
    assert (long.reward, long.acc) == (0.0, 0.0)
    assert isinstance(unreadable, Abstained)
    assert "ValueError" in unreadable.why
