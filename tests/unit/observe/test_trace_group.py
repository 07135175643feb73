"""A group's way through services and traces, and each of its ends."""

import pytest

from beamline.coordinator.observe.spans import Span
from beamline.coordinator.observe.trace_group import GroupSearch, GroupTrace, Outcome
from beamline.coordinator.observe.trace_group_show import ending, show_group
from made_spans import group_spans, link_to, span, text_of

GROUP = "g-000012"
ROOTS = [
    span("step", 0, 500, own_id="step 1", step=1),
    span("step", 500, 1000, own_id="step 2", trace="2", step=2),
]
LINKS = (link_to("g-000011", **{"beamline.mini_batch": "1"}), link_to(GROUP, **{"beamline.mini_batch": "2"}))
TRAINED = [
    span("bind", 550, 550, "step 2", trace="2", own_id="bind", step=2, group_ids=f"g-000011 {GROUP}"),
    span("train step", 600, 900, "step 2", trace="2", where="trainer", step=2),
    span("assemble", 600, 650, "train step", trace="2", where="trainer", links=LINKS),
    span("mini_batch", 650, 750, "train step", trace="2", where="trainer", own_id="mb1", mini_batch=1),
    span("optimizer", 740, 750, "mb1", trace="2", where="trainer", own_id="o1"),
    span("mini_batch", 750, 850, "train step", trace="2", where="trainer", own_id="mb2", mini_batch=2),
    span("optimizer", 840, 850, "mb2", trace="2", where="trainer", own_id="o2"),
    span("export", 860, 890, "train step", trace="2", where="trainer"),
]


def find(*spans: Span, group_id: str = GROUP) -> GroupTrace:
    found = GroupSearch("run", lambda: iter([*ROOTS, *spans])).find(group_id)
    assert found is not None
    return found


def test_from_prompt_to_gradient_across_two_steps():
    trace = find(*group_spans(GROUP, 10, 400), *group_spans("g-000011", 10, 300), *TRAINED)
    assert (trace.outcome, trace.step, ending(trace)) == (Outcome.TRAINED, 2, "trained in step 2")
    way = [(stop.span.name, stop.step) for stop in trace.stops]
    assert way == [
        ("admit", 1),
        ("generate group", 1),
        ("score group", 1),
        ("bind", 2),
        ("train step", 2),
        ("assemble", 2),
        ("mini_batch", 2),
        ("optimizer", 2),
        ("export", 2),
    ]
    assert [stop.span.span_id for stop in trace.stops if stop.span.name == "mini_batch"] == ["mb2"], "the one it was in"


def test_a_retry_and_a_redelivery_are_seen():
    first = group_spans(GROUP, 10, 400)[:2]
    failed = span("group failed", 300, 300, "step 1", own_id="f", group_id=GROUP, attempt=0, is_final=False)
    again = link_to(GROUP, **{"messaging.redelivered": True})
    told = {"group_id": GROUP, "attempt": 1}
    second = [
        span("admit", 301, 302, "step 1", own_id="admit again", **told),
        span("generate group", 303, 400, "admit again", own_id="generate again", links=(again,), **told),
    ]
    trace = find(*first, failed, *second)
    assert [stop.span.attributes["beamline.attempt"] for stop in trace.stops if stop.span.name == "admit"] == [0, 1]
    assert [stop.span.span_id for stop in trace.stops if stop.is_redelivered] == ["generate again"]
    assert trace.outcome is Outcome.OPEN
    text = "\n".join(shown(trace))
    assert "attempt 1" in text and "delivered again" in text
    assert "on its way, last seen in generate group" in text


@pytest.mark.parametrize(
    ("mark", "outcome", "words"),
    [
        (span("bind", 500, 500, step=2, filtered=f"g-000001 {GROUP}"), Outcome.FILTERED, "filtered: nothing was to be"),
        (span("bind", 500, 500, step=2, stale=GROUP), Outcome.STALE, "too old a policy for step 2"),
        (span("update", 500, 500, step=2, failed=GROUP), Outcome.FAILED, "failed"),
        (span("group failed", 500, 500, group_id=GROUP, is_final=True, failure="blob: lost"), Outcome.FAILED, "failed"),
        (span("finish", 900, 950, trace="end"), Outcome.STALE, "left over when the run ended"),
    ],
)
def test_every_other_end_is_named(mark: Span, outcome: Outcome, words: str):
    trace = find(*group_spans(GROUP, 10, 400), mark)
    assert trace.outcome is outcome
    assert words in ending(trace)


def test_a_group_that_the_trainer_could_not_read_failed_although_it_was_in_the_batch():
    update = span("update", 900, 900, "step 2", trace="2", step=2, failed=GROUP)
    assert find(*group_spans(GROUP, 10, 400), *TRAINED, update).outcome is Outcome.FAILED


def test_a_group_of_an_evaluation_trains_nothing():
    admitted, generated, scored = group_spans("eval-0-sums-00003", 10, 400)
    assert find(generated, scored, group_id="eval-0-sums-00003").outcome is Outcome.EVALUATED
    assert admitted.name == "admit"


def test_a_group_that_is_not_there_leaves_the_names_of_those_that_are():
    search = GroupSearch("run", lambda: iter(group_spans("g-000001", 0, 10)))
    assert search.find(GROUP) is None
    assert search.group_ids == {"g-000001"}


def shown(trace: GroupTrace) -> list[str]:
    return text_of(lambda console: show_group(trace, console))


def test_each_line_says_who_did_it_and_what_came_of_it():
    lines = shown(find(*group_spans(GROUP, 10, 400)))
    assert "+0.002 s 0.349 s generate group rollout/rollout-0 step 1 policy version 0" in lines
    assert "+0.351 s 0.039 s score group reward step 1 rewards 1 0" in lines
