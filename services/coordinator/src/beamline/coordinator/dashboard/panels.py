"""What stands on the page beside its charts, as plain facts that become JSON. Pure functions.

Numbers that a reader sees are sent as text and as they are, so that nothing on the page is rounded twice.
"""

from collections.abc import Sequence
from datetime import datetime

import msgspec

from beamline.coordinator.observe.view import Failure, RunView
from beamline.coordinator.report import content
from beamline.coordinator.summary import LedgerCounts, StepValues, Summary
from beamline.protocol.messages import PhaseName
from beamline.protocol.metric_schema import find
from beamline.runtime.json_log import LogLine, utc

MOODS = {"finished": "good", "failed": "bad", "broken off": "bad"}
RSS = "resources/rss_bytes/"
LAST_STEP = (
    ("reward/mean", "reward", "{:.3f}"),
    ("reward/accuracy", "training accuracy", "{:.3f}"),
    ("policy/mismatch_abs_mean", "mismatch", "{:.1e}"),
    ("policy/entropy", "entropy", "{:.3f}"),
    ("tokens/response_mean", "response length", "{:.1f}"),
    ("throughput/tokens_per_s", "tokens/s", "{:,.0f}"),
    ("timing/step", "seconds a step", "{:.2f}"),
)
"""Metric, label and format of the newest step's figures."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Where the run is. Times are Unix seconds."""

    run: str
    status: str
    mood: str
    """good, bad or empty."""
    is_live: bool = False
    step: int
    """Steps that are done."""
    num_steps: int
    phase: str = ""
    phase_since: float | None = None
    waiting_for: str = ""
    is_paused: bool = False
    begun: float | None
    duration_s: float | None = None
    """Of a run that is over."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    label: str
    text: str
    note: str = ""
    value: float | None = None
    """What the text shows, where it shows one number."""


class End(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    count: int
    share: float


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """issued = the sum of the ends, when nothing is unaccounted for."""

    issued: int
    ends: list[End]
    unaccounted: int


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    what: str
    since: float | None = None


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table; None is what nothing tells."""

    name: str
    service: str
    state: str
    mood: str = ""
    policy_version: int | None = None
    in_flight: int | None = None
    rss_bytes: float | None = None
    heard: float | None = None
    waits: list[Waiting] = []


class Gauge(msgspec.Struct, frozen=True, kw_only=True):
    """A value of this moment, under its name in the metric schema."""

    worker: str
    name: str
    value: float
    unit: str


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """Of which steps completions were kept."""

    number: int
    first: int
    last: int


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """An error of a worker; `time` is ISO 8601, `detail` what stands beneath its first line."""

    time: str
    worker: str
    text: str
    detail: str = ""


class Table(msgspec.Struct, frozen=True, kw_only=True):
    header: list[str]
    rows: list[list[str]]


def header(summary: Summary, view: RunView | None, num_steps: int) -> Header:
    """Args: view: of a run that lives; num_steps: of the whole run as its folder tells, 0 where it does not."""
    over = [step.step for step in summary.steps if "timing/step" in step.values]
    done = max(over, default=0)
    begun = datetime.fromisoformat(summary.started).timestamp() if summary.started else None
    mood = MOODS.get(summary.status, "")
    if view is None:
        return Header(
            run=summary.run,
            status=summary.status,
            mood=mood,
            step=done,
            num_steps=num_steps or done,
            begun=begun,
            duration_s=summary.duration_s,
        )
    return Header(
        run=summary.run,
        status=summary.status,
        mood=mood,
        is_live=True,
        step=max(done, view.policy_version),
        num_steps=view.num_steps or num_steps,
        phase=_phase(view),
        phase_since=view.phase_since,
        waiting_for=view.waiting_for,
        is_paused=view.paused,
        begun=begun,
    )


def figures(summary: Summary) -> list[Figure]:
    """The headline: as the report's, then the newest step's."""
    headline = [Figure(label=tile.label, text=tile.value, note=tile.note) for tile in content.tiles(summary)]
    return [figure for figure in headline if figure.label != "steps"] + last_step(summary.steps)


def last_step(steps: Sequence[StepValues]) -> list[Figure]:
    """Of the newest step that is over."""
    newest = next((step for step in reversed(steps) if "timing/step" in step.values), None)
    if newest is None:
        return []
    return [
        Figure(label=label, text=form.format(value), note=f"step {newest.step}", value=value)
        for metric, label, form in LAST_STEP
        if (value := newest.values.get(metric)) is not None
    ]


def ledger(summary: Summary, view: RunView | None) -> Ledger:
    """Of a live run as its coordinator told last, at a step's end, by its status or by its gauges."""
    counts = summary.ledger
    if view is not None:
        gauges = view.gauges.get("coordinator", {})
        names = LedgerCounts.__struct_fields__
        told = (view.ledger, {name: int(gauges.get(f"ledger/{name}", 0)) for name in names})
        newer = [LedgerCounts(**{name: of.get(name, 0) for name in names}) for of in told]
        counts = max([counts, *newer], key=lambda counts: (counts.issued, -counts.in_flight))
    ends = [End(name=end.name, count=end.count, share=end.share) for end in content.ledger_ends(counts)]
    return Ledger(issued=counts.issued, ends=ends, unaccounted=counts.unaccounted)


def workers(summary: Summary, view: RunView | None) -> list[Worker]:
    """By their heartbeats; of a run that is over, by what its last step says of them."""
    if view is not None and view.workers:
        return [_live_worker(name, view) for name in sorted(view.workers)]
    last = {name: value for step in summary.steps for name, value in step.values.items() if name.startswith(RSS)}
    return [
        Worker(name=metric.removeprefix(RSS), service=metric.removeprefix(RSS).partition("-")[0], state="ended",
               rss_bytes=rss)
        for metric, rss in sorted(last.items())
    ]  # fmt: skip


def gauges(view: RunView | None) -> list[Gauge]:
    """What the workers tell live; nothing of a run that is over."""
    return [
        Gauge(worker=worker, name=name, value=value, unit=known.unit if (known := find(name)) else "")
        for worker, values in sorted((view.gauges if view else {}).items())
        for name, value in sorted(values.items())
    ]


def troubles(lines: Sequence[LogLine], failures: Sequence[Failure]) -> list[Trouble]:
    """Lines of logs and last words of workers, newest first."""
    found = [_of_line(line) for line in lines]
    found += [
        Trouble(
            time=utc(failure.time),
            worker=failure.failed.worker,
            text=f"failed: {failure.failed.error}",
            detail=failure.failed.traceback,
        )
        for failure in failures
    ]
    return sorted(found, key=lambda trouble: trouble.time, reverse=True)


def sampled(steps: Sequence[int]) -> Sampled | None:
    """Args: steps: in order; None is of none."""
    return Sampled(number=len(steps), first=steps[0], last=steps[-1]) if steps else None


def evaluations(summary: Summary) -> Table:
    table = content.evaluation_table(summary)
    return Table(header=table.header, rows=table.rows)


def _phase(view: RunView) -> str:
    """Empty where nobody has told yet."""
    if view.phase_since is None:
        return ""
    return "end" if view.phase is PhaseName.DONE else str(view.phase)


def _live_worker(name: str, view: RunView) -> Worker:
    seen = view.workers[name]
    beat = seen.heartbeat
    waits = [Waiting(what=wait.what, since=wait.since) for wait in beat.waits]
    if not waits and beat.waiting_for:
        waits = [Waiting(what=beat.waiting_for)]
    left_out = view.left_out.get(name, "")
    return Worker(
        name=name,
        service=beat.service,
        state=f"left out: {left_out}" if left_out else str(beat.state),
        mood="bad" if left_out else "",
        policy_version=beat.policy_version if beat.policy_version >= 0 else None,
        in_flight=beat.in_flight,
        rss_bytes=beat.rss_bytes,
        heard=seen.seen,
        waits=waits,
    )


def _of_line(line: LogLine) -> Trouble:
    first, _, rest = line.message.partition("\n")
    if first.startswith("Traceback") and rest:
        first = rest.rstrip().rpartition("\n")[2]
        rest = line.message
    detail = "\n".join(part for part in (rest, line.exception) if part)
    return Trouble(time=line.time, worker=line.worker, text=first, detail=detail)
