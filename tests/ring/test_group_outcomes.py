"""The traces of a run in which much goes wrong tell the end of every group as the ledger knows it."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec

from beamline.coordinator.observe.spans import read_spans
from beamline.coordinator.observe.trace_group import GroupSearch, GroupTrace
from beamline.coordinator.summary import Summary

SUPPORT = Path(__file__).parents[1] / "support"
RUN_DEADLINE_S = 60.0


def test_every_groups_end_is_the_ledgers(tmp_path: Path):
    command = [sys.executable, SUPPORT / "traced_ring.py", tmp_path, "rough"]
    subprocess.run(command, check=True, timeout=RUN_DEADLINE_S, cwd=SUPPORT)
    spans = list(read_spans(tmp_path))
    search = GroupSearch("ring", lambda: iter(spans))
    assert search.find("g-none") is None
    ways = [way for group_id in search.group_ids if group_id.startswith("g-") and (way := search.find(group_id))]
    ledger = msgspec.json.decode((tmp_path / "summary.json").read_bytes(), type=Summary).ledger
    assert len(ways) == ledger.issued
    ends = Counter(way.outcome.value for way in ways)
    assert {end: ends[end] for end in ("trained", "filtered", "stale", "failed")} == {
        "trained": ledger.trained,
        "filtered": ledger.filtered,
        "stale": ledger.stale,
        "failed": ledger.failed,
    }
    for way in ways:
        assert "admit" in names(way)
        assert ("bind" in names(way)) or way.outcome in ("failed", "stale"), way.group_id


def names(way: GroupTrace) -> list[str]:
    return [stop.span.name for stop in way.stops]
