"""What becomes of prompt groups, in the traces: a mark for every decision of the journal."""

from beamline.coordinator import journal as j
from beamline.coordinator.ledger import End, Ledger
from beamline.coordinator.traces import Traces
from beamline.runtime.trace_context import GROUP_ID, STEP


def tell_fate(record: j.AnyRecord, ledger: Ledger, traces: Traces) -> None:
    """Mark a record that has just been applied; most decide nothing."""
    match record:
        case j.Batched():
            bound = {"group_ids": record.kept, "filtered": record.filtered, "stale": record.stale}
            named = {f"beamline.{which}": " ".join(group_ids) for which, group_ids in bound.items() if group_ids}
            traces.mark("bind", {STEP: record.step, **named})
        case j.Updated():
            failed = {"beamline.failed": " ".join(record.failed)} if record.failed else {}
            traces.mark("update", {STEP: record.step, **failed})
        case j.Failed(failed=failed):
            is_final = ledger.end_of(failed.group_id) is End.FAILED
            told = {"beamline.attempt": failed.attempt, "beamline.failure": f"{failed.kind}: {failed.text}"}
            traces.mark("group failed", {GROUP_ID: failed.group_id, **told, "beamline.is_final": is_final})
        case _:
            pass
