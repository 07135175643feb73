"""A run as a timeline, read back with Perfetto's schema."""

import random
from collections import defaultdict
from pathlib import Path

import msgspec
import pytest

from beamline.coordinator.observe.gauge_lines import GaugeLine, read_gauges
from beamline.coordinator.observe.perfetto_packets import PacketWriter
from beamline.coordinator.observe.perfetto_timeline import Timeline as Writer
from beamline.coordinator.observe.perfetto_timeline import write_timeline
from beamline.coordinator.observe.span_order import in_order
from beamline.coordinator.observe.spans import Span
from beamline.protocol.errors import ConfigError
from example_spans import write_example_traces
from made_spans import MS, group_spans, link_to, span
from perfetto_reader import Timeline, read_timeline


def written(tmp_path: Path, spans: list[Span], gauges: list[GaugeLine] | None = None) -> Timeline:
    path = tmp_path / "timeline"
    with path.open("wb") as file:
        Writer(PacketWriter(file)).write(in_order(spans), gauges or [])
    return read_timeline(path)


def test_a_runs_phases_stand_under_its_steps(tmp_path: Path):
    write_example_traces(tmp_path)
    assert write_timeline(tmp_path, tmp_path / "out" / "run.pftrace") == 36
    timeline = read_timeline(tmp_path / "out" / "run.pftrace")
    assert sorted(timeline.processes) == ["coordinator", "reward", "rollout", "trainer"]
    for phase, start_ms in (("generate", 0), ("train", 500), ("sync", 900), ("report", 980)):
        found = [(each.track, each.start_ns, each.depth) for each in timeline.named(phase)]
        assert found == [("coordinator.coordinator.phases", (s * 1000 + start_ms) * MS, 1) for s in (1, 2)], phase
    assert [(each.track, each.depth) for each in timeline.named("optimizer")] == [("trainer.trainer.phases", 2)] * 2
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["run.pftrace"], "nothing half-written is left"


def test_groups_that_run_side_by_side_never_lie_within_each_other(tmp_path: Path):
    rng = random.Random(0)
    starts = [rng.uniform(0, 1000) for _ in range(200)]
    spans = [each for n, at in enumerate(starts) for each in group_spans(f"g-{n:06d}", at, at + rng.uniform(5, 400))]
    timeline = written(tmp_path, spans)
    assert len(timeline.slices) == len(spans)
    assert {each.depth for each in timeline.slices} == {0}
    assert {each.track for each in timeline.slices} == {
        "coordinator.coordinator.groups",
        "rollout.rollout-0.groups",
        "reward.reward.groups",
    }


def test_phases_that_overlap_without_nesting_get_a_lane_of_their_own(tmp_path: Path):
    spans = [span("a", 0, 100), span("inside", 10, 90), span("beyond", 50, 150), span("after", 100, 120)]
    timeline = written(tmp_path, spans)
    assert {each.name: each.depth for each in timeline.slices} == {"a": 0, "inside": 1, "beyond": 0, "after": 0}


def test_an_arrow_leads_from_the_prompt_to_the_gradient(tmp_path: Path):
    links = (link_to("g-000000"), link_to("g-000001"))
    assemble = span("assemble", 600, 700, where="trainer", links=links)
    timeline = written(tmp_path, [*group_spans("g-000000", 0, 100), *group_spans("g-000001", 0, 100), assemble])
    flows: dict[int, list[str]] = defaultdict(list)
    for each in sorted(timeline.slices, key=lambda each: each.start_ns):
        for flow in each.flows:
            flows[flow].append(each.name)
    assert sorted(flows.values()) == [
        [f"admit {group}", f"generate group {group}", f"score group {group}", "assemble"]
        for group in ("g-000000", "g-000001")
    ]


def test_counters_of_groups_bytes_and_gauges(tmp_path: Path):
    spans = [
        span("generate group", 0, 30, where="rollout/rollout-0", own_id="a", group_id="a", num_bytes=100),
        span("generate group", 10, 20, where="rollout/rollout-0", own_id="b", group_id="b", num_bytes=50),
    ]
    values = {"queue/pending/rollout": 3.0, "blobs/used_bytes": 7.0}
    gauge = GaugeLine(time=0.015, service="coordinator", worker="coordinator", values=values)
    timeline = written(tmp_path, spans, [gauge])
    of_rollout = "rollout.rollout-0."
    in_flight = [(0, 1), (10 * MS, 2), (20 * MS, 1), (30 * MS, 0)]
    assert timeline.counters[of_rollout + "in flight: generate group"] == in_flight
    assert timeline.counters[of_rollout + "bytes so far: generate group"] == [(20 * MS, 50), (30 * MS, 150)]
    assert timeline.counters["coordinator.coordinator.queue/pending/rollout"] == [(15 * MS, 3)]
    assert timeline.units["coordinator.coordinator.queue/pending/rollout"] == "messages"
    assert timeline.units["coordinator.coordinator.blobs/used_bytes"] == "bytes"


def test_what_a_span_says_can_be_read_on_its_slice(tmp_path: Path):
    (one,) = written(tmp_path, [span("train step", 0, 9, error="NotFinite", step=3, lr=0.5, ok=True, what="x")]).slices
    told = {"beamline.step": 3, "beamline.lr": 0.5, "beamline.ok": True, "beamline.what": "x"}
    assert one.notes == told | {"trace_id": "1", "error": "NotFinite"}


@pytest.mark.parametrize("held", [1, 7, 1000])
def test_spans_are_put_in_order_whatever_fits_in_memory(held: int):
    rng = random.Random(held)
    spans = [
        span("work", start, start + rng.randrange(50), own_id=str(n))
        for n in range(100)
        if (start := rng.randrange(90)) >= 0
    ]
    ordered = list(in_order(iter(spans), held))
    assert ordered == sorted(spans, key=lambda each: (each.start_ns, -each.end_ns))


def test_a_run_without_spans_leaves_no_file(tmp_path: Path):
    (tmp_path / "traces").mkdir()
    with pytest.raises(ConfigError, match="has no spans yet"):
        write_timeline(tmp_path, tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["traces"]


def test_damaged_gauges_are_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    line = GaugeLine(time=1.0, service="reward", worker="reward", values={"grading/running/reward": 2})
    (tmp_path / "gauges.jsonl").write_bytes(msgspec.json.encode(line) + b"\n{\n")
    assert list(read_gauges(tmp_path)) == [line]
    assert "gauges.jsonl line 2 is left out" in caplog.text
