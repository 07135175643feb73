"""An evaluation on the terminal: one row a data source."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from beamline.coordinator.summary import Evaluation

_PASS = "pass_at_"


def show_evaluations(evaluations: Sequence[Evaluation], console: Console) -> None:
    """Accuracy with its interval over problems, pass@k, and what happened to the samples."""
    ks = sorted({int(name.removeprefix(_PASS)) for e in evaluations for name in e.values if name.startswith(_PASS)})
    header = ("evaluation", "problems", "samples", "accuracy", "95 %", *(f"pass@{k}" for k in ks if k > 1))
    table = Table(*header, "mean length", "truncated", "abstained", "failed", "dropped", box=None)
    for evaluation in evaluations:
        values = evaluation.values
        table.add_row(
            evaluation.name,
            f"{values['num_problems']:.0f}",
            f"{values['num_samples']:.0f}",
            percent(values.get("accuracy")),
            interval(values.get("accuracy_low"), values.get("accuracy_high")),
            *(percent(values.get(f"{_PASS}{k}")) for k in ks if k > 1),
            f"{values['mean_length']:.1f}",
            percent(values["truncated"]),
            percent(values["abstained"]),
            f"{values['failed']:.0f}",
            f"{values['dropped']:.0f}",
        )
    console.print(table)


def percent(share: float | None) -> str:
    """Such as "61.3 %"; a dash for what is not there."""
    return "–" if share is None else f"{100 * share:.1f} %"


def interval(low: float | None, high: float | None) -> str:
    """Such as "55.0 % to 67.1 %"; a dash for what is not there."""
    return "–" if low is None or high is None else f"{percent(low)} to {percent(high)}"
