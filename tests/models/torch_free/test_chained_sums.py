"""The task: problems in range, solutions right or flawed as asked, splits that do not meet, rows in DAPO's columns."""

import random
import re

import pytest

from beamline.models import chained_sums
from beamline.models.chained_sums import TOTALS, Flaws, Problem
from beamline.models.datasets import read_rows

PROBLEM = Problem(7, (-2, 6, 9))


def test_a_problem_reads_as_an_expression_with_its_value():
    assert PROBLEM.expression == "7-2+6+9"
    assert PROBLEM.answer == 20


def test_a_flawless_solution_writes_every_running_total():
    assert chained_sums.solve(PROBLEM) == "7-2=5\n5+6=11\n11+9=20\nAnswer: 20"


def test_running_totals_stay_in_range():
    generator = random.Random(1)
    for _ in range(500):
        problem = chained_sums.draw_problem(generator)
        totals = [problem.start + sum(problem.steps[:number]) for number in range(len(problem.steps) + 1)]
        assert all(total in TOTALS for total in totals)
        assert len(problem.steps) in chained_sums.NUM_STEPS


def test_every_line_of_a_flawless_solution_is_true():
    for problem in chained_sums.distinct_problems(3, 200):
        *lines, last = chained_sums.solve(problem).split("\n")
        assert len(lines) == len(problem.steps)
        for line in lines:
            left, sign, right, total = re.fullmatch(r"(\d+)([+-])(\d+)=(\d+)", line).groups()
            assert int(left) + int(sign + right) == int(total)
        assert last == f"Answer: {problem.answer}"


def test_leaving_out_the_last_step_answers_with_the_total_before_it():
    flaws = Flaws(leave_out_last=1.0, wrong_total=0.0)
    assert chained_sums.solve(PROBLEM, flaws, random.Random(0)) == "7-2=5\n5+6=11\nAnswer: 11"


def test_flaws_come_as_often_as_asked():
    generator = random.Random(5)
    problems = chained_sums.distinct_problems(4, 2_000)
    flaws = Flaws(leave_out_last=0.5, wrong_total=0.0)
    short = sum(chained_sums.solve(p, flaws, generator).count("=") < len(p.steps) for p in problems)
    assert 0.45 < short / len(problems) < 0.55
    flaws = Flaws(leave_out_last=0.0, wrong_total=1.0)
    for problem in problems[:50]:
        first = chained_sums.solve(problem, flaws, generator).split("\n")[0]
        assert int(first.split("=")[1]) != problem.start + problem.steps[0]


def test_splits_are_distinct_repeatable_and_do_not_meet():
    held_out = set(chained_sums.eval_problems(chained_sums.MAX_EVAL_PROBLEMS))
    warm_start = set(chained_sums.warm_start_problems())
    train = chained_sums.train_problems(5_000)
    assert len(set(train)) == 5_000
    assert not held_out & warm_start and not held_out & set(train) and not warm_start & set(train)
    assert chained_sums.train_problems(100) == train[:100]
    assert chained_sums.eval_problems(256) == chained_sums.eval_problems(512)[:256]


def test_rows_are_read_back_as_prompts(tmp_path):
    train_path, eval_path = chained_sums.write_parquet(tmp_path, num_train=50, num_eval=20)
    train, held_out = list(read_rows(train_path)), list(read_rows(eval_path))
    assert (len(train), len(held_out)) == (50, 20)
    problem = chained_sums.eval_problems(20)[3]
    assert held_out[3].data_source == "chained-sums"
    assert held_out[3].messages == ({"role": "user", "content": problem.prompt},)
    assert (held_out[3].ground_truth, held_out[3].index, held_out[3].split) == (str(problem.answer), 3, "eval")


def test_more_evaluation_problems_than_are_held_out_are_refused():
    with pytest.raises(ValueError, match="5000 evaluation problems asked for, but only 1024 are held out"):
        chained_sums.eval_problems(5_000)
