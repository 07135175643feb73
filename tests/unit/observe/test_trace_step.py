"""The tree of a step, and what the step waited for: its pieces add up to the step, and each gap has a name."""

import random
from itertools import pairwise

import pytest

from beamline.coordinator.observe.spans import Span
from beamline.coordinator.observe.trace_show import show_step
from beamline.coordinator.observe.trace_step import StepTrace, trace_step
from beamline.protocol.errors import ConfigError
from made_spans import group_spans, link_to, span, text_of

STEP = [
    span("step", 0, 1000, own_id="step 1", step=1),
    span("generate", 0, 500, "step 1"),
    span("train", 500, 900, "step 1"),
    span("train step", 510, 895, "train", where="trainer"),
    span("assemble", 520, 600, "train step", where="trainer", links=(link_to("g-000000"), link_to("g-000001"))),
    span("mini_batch", 600, 880, "train step", where="trainer"),
    span("sync", 900, 1000, "step 1"),
    span("activate", 910, 960, "sync", where="rollout/rollout-0", own_id="fast"),
    span("activate", 910, 990, "sync", where="rollout/rollout-1", own_id="slow"),
    *group_spans("g-000000", 10, 300),
    *group_spans("g-000001", 12, 480, worker="rollout-1"),
]


def traced(spans: list[Span], step: int | None = None) -> StepTrace:
    return trace_step("run", lambda: iter(spans), step)


def chain(trace: StepTrace) -> list[str]:
    return [f"({segment.gap})" if segment.gap else segment.span.span_id for segment in trace.path]


def test_the_step_waited_for_the_last_group_and_the_slowest_worker():
    assert chain(traced(STEP)) == [
        "(generate: before admit)",
        "admit g-000001",
        "(from admit to generate group)",
        "generate g-000001",
        "score g-000001",
        "(generate: after score group)",
        "(train: before train step)",
        "(train step: before assemble)",
        "assemble",
        "mini_batch",
        "(train step: after mini_batch)",
        "(train: after train step)",
        "(sync: before activate)",
        "slow",
        "(sync: after activate)",
    ]


@pytest.mark.parametrize("seed", range(50))
def test_the_chain_covers_the_step_once_whatever_overlaps(seed: int):
    rng = random.Random(seed)
    spans = [span("step", 0, 1000, own_id="0", step=1)]
    for number in range(1, 40):
        start = rng.uniform(0, 1200)
        parent = str(rng.randrange(number))
        spans.append(span("work", start, start + rng.uniform(0, 400), parent, own_id=str(number)))
    path = traced(spans).path
    assert path[0].start_ns == 0 and path[-1].end_ns == spans[0].end_ns
    assert all(one.end_ns == after.start_ns for one, after in pairwise(path))


def test_a_group_of_an_earlier_step_counts_from_where_this_one_began_to_wait():
    second = [
        span("step", 1000, 2000, own_id="step 2", trace="2", step=2),
        span("generate", 1000, 1500, "step 2", trace="2", own_id="generate 2"),
        span("assemble", 1600, 1700, "step 2", trace="2", where="trainer", links=(link_to("g-000007"),)),
        *group_spans("g-000007", 600, 1400),
    ]
    path = traced(STEP + second).path
    assert [segment.span.span_id for segment in path[:3]] == ["generate g-000007", "score g-000007", "generate 2"]
    assert path[0].start_ns == 1000 * 10**6, "what it was generated before belongs to the step before"


def test_a_handler_that_ends_after_it_has_answered_is_waited_for_all_the_same():
    late = [
        span("step", 0, 100, own_id="step 1", step=1),
        span("train", 0, 50, "step 1"),
        span("train step", 5, 52, "train", where="trainer"),
        span("sync", 50, 100, "step 1"),
    ]
    assert chain(traced(late)) == ["(train: before train step)", "train step", "sync"]


def test_spans_whose_parent_is_lost_stand_under_the_root():
    trace = traced([STEP[0], span("mini_batch", 10, 20, "a killed trainer's", where="trainer")])
    assert [child.span.name for child in trace.root.children] == ["mini_batch"]


def test_the_last_step_that_has_ended_unless_another_is_asked_for():
    later = span("step", 1000, 1100, own_id="step 2", trace="2", step=2)
    under_way = span("generate", 1100, 1200, "step 3", trace="3", own_id="generate 3")
    assert traced([*STEP, later, under_way]).step == 2
    assert traced([*STEP, later], 1).step == 1
    with pytest.raises(ConfigError, match="no trace of a step 9 that has ended: the nearest is 2"):
        traced([*STEP, later], 9)
    with pytest.raises(ConfigError, match="no step of run run has ended yet"):
        traced([under_way])


def shown(trace: StepTrace) -> list[str]:
    return text_of(lambda console: show_step(trace, console))


def test_the_tree_says_where_how_long_and_what_share():
    lines = shown(traced(STEP))
    assert lines[0] == "step 1 of run run: 1.000 s"
    assert "● train coordinator +0.500 s 0.400 s 40.0 %" in lines
    assert "● generate group g-000001 rollout/rollout-1 +0.014 s 0.419 s 41.9 %" in lines
    assert "generate group g-000000 rollout/rollout-0 +0.012 s 0.259 s 25.9 %" in lines, "not waited for: no mark"
    assert "(train: before train step) coordinator 0.010 s 1.0 %" in lines


def test_of_many_alike_only_those_that_were_waited_for_are_shown():
    many = [each for number in range(2, 20) for each in group_spans(f"g-{number:06d}", 10, 100 + number)]
    lines = shown(traced(STEP + many))
    assert "19 more admit, with what followed: 0.092 s to 0.290 s" in lines
    assert sum("generate group" in line for line in lines) == 2, "the tree's and the chain's"
