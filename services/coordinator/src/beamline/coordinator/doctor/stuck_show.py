"""The findings in a terminal: the root cause first, then who waits for whom."""

from collections import Counter
from collections.abc import Iterator

from beamline.coordinator.doctor.stuck import Diagnosis, Edge, Finding

NUM_LAST_LINES = 10
WAITS_A_WORKER = 4


def lines(diagnosis: Diagnosis) -> Iterator[str]:
    """What `beamline doctor stuck` prints."""
    if diagnosis.is_stuck:
        yield f"run {diagnosis.run} is stuck: {diagnosis.where}"
    elif diagnosis.was_answered:
        yield f"run {diagnosis.run} moves: {diagnosis.where}"
    else:
        yield f"run {diagnosis.run}: nothing is found that holds it up, but {diagnosis.where}"
    shown = set[str]()
    for number, finding in enumerate(diagnosis.findings, start=1):
        yield ""
        yield f"{number}. {finding.text}"
        if finding.log and finding.log not in shown:
            yield from _log_lines(finding)
        shown.add(finding.log)
    if diagnosis.waits:
        yield ""
        yield "who waits for what:"
        yield from _wait_lines(diagnosis.waits)


def _log_lines(finding: Finding) -> Iterator[str]:
    if finding.last_lines:
        yield f"   its last log lines ({finding.log}):"
        yield from (f"     {line}" for line in finding.last_lines[-NUM_LAST_LINES:])
    else:
        yield f"   its log is empty or gone: {finding.log}"


def _wait_lines(waits: list[Edge]) -> Iterator[str]:
    shown = Counter[str]()
    for wait in waits:
        shown[wait.worker] += 1
        if shown[wait.worker] <= WAITS_A_WORKER:
            yield f"  {wait_line(wait)}"
    for worker, number in shown.items():
        if number > WAITS_A_WORKER:
            yield f"  {worker} has {number - WAITS_A_WORKER} more waits"


def wait_line(wait: Edge) -> str:
    """A wait as a sentence."""
    named = [name for name in wait.on if name not in wait.what]
    on = f", from {' or '.join(named)}" if named else ""
    within = f" of at most {wait.within_s:.0f} s" if wait.within_s else " s"
    return f"{wait.worker} has waited {wait.for_s:.0f}{within} for {wait.what}{on}"
