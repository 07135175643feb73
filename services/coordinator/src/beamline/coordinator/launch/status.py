"""How a run stands, as a table: from the coordinator while it lives, from its summary afterwards."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from beamline.coordinator.launch.progress import adapter_size, eval_line, step_line
from beamline.coordinator.summary import Summary
from beamline.protocol.messages import EvalResult, Heartbeat, StatusReply


def show_status(status: StatusReply, console: Console) -> None:
    """A live run: where it is, its ledger and its workers."""
    console.print(f"run {status.run}: step {status.step}/{status.num_steps}, {status.phase}{_paused(status)}")
    if status.waiting_for:
        console.print(f"waiting for {status.waiting_for}")
    if status.metrics:
        console.print(step_line(status.step, status.num_steps, status.metrics))
    console.print(ledger_line(status.ledger))
    console.print(_workers(status.workers))


def show_summary(summary: Summary, console: Console) -> None:
    """A run that has ended."""
    steps = _count(sum("timing/step" in step.values for step in summary.steps), "step")
    console.print(f"run {summary.run}: {summary.status} after {steps} in {summary.duration_s:.0f} s")
    for evaluation in summary.evaluations:
        values = evaluation.values
        result = EvalResult(
            step=evaluation.step,
            policy_version=evaluation.step,
            name=evaluation.name,
            num_problems=int(values.get("num_problems", 0)),
            num_samples=int(values.get("num_samples", 0)),
            values=values,
        )
        console.print(eval_line(result), highlight=False, markup=False)
    ledger = summary.ledger
    names = ("issued", "trained", "filtered", "stale", "failed")
    console.print(ledger_line({name: getattr(ledger, name) for name in names}))
    last = summary.steps[-1].values if summary.steps else {}
    for line in [*data_lines(last), *adapter_lines(last)]:
        console.print(line)


def data_lines(values: Mapping[str, float]) -> list[str]:
    """Where the data cursor stands after a step; nothing where the step does not tell."""
    if "data/epoch" not in values:
        return []
    dropped = values["data/dropped_prompts"]
    return [f"prompts: {values['data/epoch']:.3f} epochs drawn, {dropped:.0f} prompts left out as too long"]


def adapter_lines(values: Mapping[str, float]) -> list[str]:
    """What a sync moved, where a run trained adapters."""
    return [f"adapters: {adapter_size(values)} a sync"] if "sync/adapter_bytes" in values else []


def ledger_line(ledger: dict[str, int]) -> str:
    """Groups by their ends: issued is the sum of the others."""
    ends = " + ".join(f"{count} {name}" for name, count in ledger.items() if name != "issued")
    return f"groups: {ledger['issued']} issued = {ends}"


def artifact_lines(run_dir: Path, summary: Summary) -> list[str]:
    """Where everything that the run has left lies, as paths from here."""
    artifacts = summary.artifacts
    paths = [
        ("summary", str(run_dir / "summary.json")),
        ("report", artifacts.report),
        ("metrics", artifacts.metrics),
        ("logs", artifacts.logs),
        ("traces", artifacts.traces),
        ("checkpoint", artifacts.checkpoint),
        ("export", artifacts.export),
    ]
    return [f"  {name:<11}{_from_here(path)}" for name, path in paths if path]


def _from_here(path: str) -> str:
    here = Path.cwd()
    absolute = Path(path).resolve()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _paused(status: StatusReply) -> str:
    return ", paused" if status.paused else ""


def _workers(heartbeats: Iterable[Heartbeat]) -> Table:
    table = Table("worker", "state", "policy", "in flight", "memory", "pid", "waiting for", box=None)
    for heartbeat in heartbeats:
        table.add_row(
            heartbeat.worker,
            str(heartbeat.state),
            str(heartbeat.policy_version) if heartbeat.policy_version >= 0 else "-",
            str(heartbeat.in_flight),
            f"{heartbeat.rss_bytes / 2**20:.0f} MiB",
            str(heartbeat.pid),
            heartbeat.waiting_for,
        )
    return table
