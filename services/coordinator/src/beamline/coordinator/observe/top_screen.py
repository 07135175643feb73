"""What `beamline top` shows, as a renderable for a terminal of any size: a pure function of a `RunView`."""

import time
from collections.abc import Iterable, Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from beamline.coordinator.launch.progress import eval_line, step_line
from beamline.coordinator.observe.flow import Stage, queue_depths, stages
from beamline.coordinator.observe.view import RunView, SeenWorker
from beamline.protocol.messages import WorkerState

_COLUMNS = {
    "worker": 0, "state": 0, "policy": 50, "held": 60, "memory": 60, "heard": 0, "pid": 100, "waits for": 70,
}  # fmt: skip
"""Of a worker, each with the width of the screen from which on it is shown."""
LATE_S = 10.0
"""A heartbeat older than this is marked; five of them are missing then."""
LOW = 18
"""Lines below which the last step is left out."""
_NUM_ERRORS = 4
_NUM_SHOWN_WORKERS = 4
"""Workers that bars make room for."""
_NUM_WORKER_TITLES = 2
_STATE_STYLES = {
    WorkerState.STARTING: "yellow", WorkerState.READY: "green", WorkerState.BUSY: "bold green",
    WorkerState.PAUSED: "yellow", WorkerState.DRAINING: "dim",
}  # fmt: skip


class Screen(msgspec.Struct, frozen=True, kw_only=True):
    """A terminal and what does not come over the bus."""

    run: str
    width: int
    height: int
    started: float
    """When the run was started, Unix seconds."""
    notes: Sequence[str] = ()
    """Said by this program itself, such as that the bus is away; newest last."""


def render(view: RunView, screen: Screen, now: float) -> RenderableType:
    """The whole screen, at most `height` lines of `width` columns; `now` is Unix time in seconds."""
    head = [_title(view, screen, now), _run_bar(view, screen), *_phase(view, now)]
    groups = _titled("groups", [_stage_bar(stage, screen) for stage in stages(view)])
    last = _titled("last step", _last_step(view)) if screen.height >= LOW else []
    errors = _titled("errors", _errors(view, screen))
    foot = [*errors, Text(" q leaves, the run goes on", style="dim")]
    room = screen.height - len(head) - len(last) - len(foot) - _NUM_WORKER_TITLES
    if room - len(groups) < min(_NUM_SHOWN_WORKERS, len(view.workers)):
        groups = groups[: max(0, room - min(_NUM_SHOWN_WORKERS, len(view.workers)))]
    workers = _workers(view, screen, now, max(1, room - len(groups)))
    return Group(*head, *groups, *last, *_titled("workers", [workers]), *foot)


def clock(seconds: float) -> str:
    """`0:04:05`, and `2 d 3:04:05` for what takes days."""
    minutes, s = divmod(int(max(0.0, seconds)), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    return (f"{days} d " if days else "") + f"{h}:{m:02}:{s:02}"


def _titled(title: str, rows: Sequence[RenderableType]) -> list[RenderableType]:
    return [Rule(title, style="dim", align="left"), *rows] if rows else []


def _title(view: RunView, screen: Screen, now: float) -> Text:
    left = view.left_s(now)
    parts = [
        (f" {screen.run}", "bold"),
        (f"  step {view.step}/{view.num_steps}", ""),
        (f"  {view.phase}{', paused' if view.paused else ''}", "bold cyan"),
        (f"  policy {view.policy_version}", ""),
        (f"  {clock(now - screen.started)} elapsed", ""),
        (f"  about {clock(left)} left" if left is not None and not view.is_done else "", ""),
    ]
    return _line(Text.assemble(*parts))


def _run_bar(view: RunView, screen: Screen) -> RenderableType:
    return _bar("run", view.policy_version, view.num_steps, f"{view.policy_version}/{view.num_steps} steps", screen)


def _stage_bar(stage: Stage, screen: Screen) -> RenderableType:
    if not stage.total:
        return _bar(stage.name, 0, 0, f"{stage.num:.0f} {stage.unit}", screen)
    bounded = stage.name in ("scored", "training")
    count = f"{stage.num:.0f}/{stage.total:.0f}" if bounded else f"{stage.num:.0f}"
    queued = f", {stage.queued:.0f} queued" if stage.queued is not None else ""
    return _bar(stage.name, stage.num, stage.total, f"{count} {stage.unit}{queued}", screen)


def _bar(name: str, num: float, total: float, text: str, screen: Screen) -> RenderableType:
    """A name, a bar (none for a total of 0), and what it says."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=9)
    width = max(10, min(60, screen.width - 46))
    grid.add_column(width=width)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    bar = ProgressBar(total=total, completed=min(num, total), width=width) if total else Text()
    grid.add_row(Text(f" {name}"), bar, Text(text))
    return grid


def _phase(view: RunView, now: float) -> list[Text]:
    """How long the phase has lasted, and what the coordinator waits for in it."""
    if view.phase_since is None or view.is_done:
        return []
    since = view.phase_since
    fresh = (w for w in view.workers.values() if w.heartbeat.service == "coordinator" and w.seen >= since)
    waits = next((what_it_waits_for(view, seen, now) for seen in fresh), "")
    lasted = f" {view.phase} for {max(0.0, now - since):.0f} s"
    return [_line(Text(lasted + (f", waiting for {waits}" if waits else ""), style="dim"))]


def _last_step(view: RunView) -> list[Text]:
    values, rows = view.last_values(), list[Text]()
    if "timing/step" in values:
        step = max(step for step, known in view.steps.items() if known is values)
        rows.append(_line(Text(f" {step_line(step, view.num_steps, values)}")))
    told = [
        f"{values[name]:.0f} {label}"
        for name, label in (
            ("throughput/generate_tokens_per_s", "tokens/s generated"),
            ("throughput/tokens_per_s", "tokens/s overall"),
        )
        if name in values
    ]
    queues = ", ".join(f"{name} {depth:.0f}" for name, depth in sorted(queue_depths(view).items()))
    if queues:
        told.append(f"queues: {queues}")
    if told:
        rows.append(_line(Text(" " + "   ".join(told))))
    rows += [_line(Text(f" {eval_line(result)}")) for result in list(view.evaluations.values())[:2]]
    return rows


def _workers(view: RunView, screen: Screen, now: float, num_rows: int) -> Table:
    """One row a worker; the ones that need looking at come first where there is no room for all."""
    columns = [name for name, least in _COLUMNS.items() if screen.width >= least]
    table = Table(box=None, padding=(0, 1), expand=True, show_edge=False)
    for column in columns:
        if column == "waits for":
            table.add_column(column, no_wrap=True, overflow="ellipsis", ratio=1)
        else:
            justify = "left" if column in ("worker", "state") else "right"
            table.add_column(column, no_wrap=True, justify=justify)
    names = sorted(view.workers)
    if len(names) > num_rows:
        names = sorted(names, key=lambda name: (not _needs_a_look(view, name, now), name))[: max(1, num_rows - 1)]
    for name in sorted(names):
        row = _worker_row(view, name, now)
        table.add_row(*(row[column] for column in columns))
    if (num_left := len(view.workers) - len(names)) > 0:
        table.add_row(Text(f"and {num_left} more", style="dim"))
    return table


def _worker_row(view: RunView, name: str, now: float) -> dict[str, Text]:
    seen, age = view.workers[name], view.age_s(name, now)
    heartbeat, is_late = seen.heartbeat, age > LATE_S and not view.is_done
    version = str(heartbeat.policy_version) if heartbeat.policy_version >= 0 else "-"
    state_style = "red" if is_late else _STATE_STYLES.get(heartbeat.state, "")
    return {
        "worker": Text(name),
        "state": Text("silent" if is_late else str(heartbeat.state), style=state_style),
        "policy": Text(version),
        "held": Text(str(heartbeat.in_flight)),
        "memory": Text(_size(heartbeat.rss_bytes)),
        "heard": Text(f"{age:.0f} s", style="bold red" if is_late else ""),
        "pid": Text(str(heartbeat.pid)),
        "waits for": Text(what_it_waits_for(view, seen, now), style="red" if name in view.left_out else ""),
    }


def what_it_waits_for(view: RunView, seen: SeenWorker, now: float) -> str:
    """Why it is left out, else its oldest wait and for how long; empty when it waits for nothing.

    A wait that will be given up comes before one for more work, which ends with the run.
    """
    heartbeat = seen.heartbeat
    if reason := view.left_out.get(heartbeat.worker):
        return f"left out: {reason}"
    if heartbeat.waits:
        wait = next((wait for wait in heartbeat.waits if wait.until), heartbeat.waits[0])
        return f"{wait.what} ({max(0.0, now - wait.since):.0f} s)"
    return heartbeat.waiting_for


def _needs_a_look(view: RunView, name: str, now: float) -> bool:
    return view.age_s(name, now) > LATE_S or name in view.left_out or not view.workers[name].has_started


def _errors(view: RunView, screen: Screen) -> list[Text]:
    """The newest ones; more of them on a higher screen."""
    room = max(1, min(_NUM_ERRORS, (screen.height - 18) // 3))
    failures = [
        f" {time.strftime('%H:%M:%S', time.localtime(failure.time))} {failure.failed.worker} failed: "
        + failure.failed.error.partition("\n")[0]
        for failure in view.failures
    ]
    notes = [f" {note}" for note in screen.notes]
    return [_line(Text(text, style="red")) for text in [*failures[-room:], *notes[-1:]]]


def _line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def end_lines(view: RunView, run: str) -> Iterable[str]:
    """How a run ended that left no summary."""
    state = "is done" if view.is_done else "was ended before its end"
    yield f"run {run} {state}: {view.policy_version}/{view.num_steps} steps"
    yield from (f"{failure.failed.worker} failed: {failure.failed.error}" for failure in view.failures)
