"""What a run's files tell of it, as the messages that a listener would have heard."""

from pathlib import Path

from beamline.coordinator.metrics_file import read_metrics
from beamline.coordinator.observe.view import RunView
from beamline.coordinator.summary import EVAL_PREFIX, read_summary
from beamline.protocol.messages import EvalResult, Metrics, Phase, PhaseName
from beamline.runtime.run_files import read_config


def recall(run_dir: Path, view: RunView) -> None:
    """Feed the view the run's steps and evaluations so far and, if the run is over, that it is.

    A file that is not there tells nothing.

    Raises:
        ConfigError: the configuration is missing, or a file is damaged.
    """
    if not view.num_steps:
        view.num_steps = read_config(run_dir).trainer.num_steps
    for line in read_metrics(run_dir / "metrics.jsonl"):
        values = {name: value for name, value in line.values.items() if not name.startswith(EVAL_PREFIX)}
        if values:
            view.apply(Metrics(service="coordinator", worker="coordinator", step=line.step, values=values), line.time)
        for result in eval_results(line.step, line.values):
            view.apply(result, line.time)
    if (run_dir / "summary.json").is_file():
        summary = read_summary(run_dir / "summary.json")
        ledger = {name: getattr(summary.ledger, name) for name in summary.ledger.__struct_fields__}
        done = Phase(
            sequence=0, step=view.policy_version, phase=PhaseName.DONE, policy_version=view.policy_version, granted=True
        )
        view.ledger = ledger
        view.apply(done, (run_dir / "summary.json").stat().st_mtime)


def eval_results(step: int, values: dict[str, float]) -> list[EvalResult]:
    """The evaluated data sources of a record, whose names are `eval/<data source>/<figure>`."""
    found: dict[str, dict[str, float]] = {}
    for metric, value in values.items():
        if metric.startswith(EVAL_PREFIX):
            name, _, figure = metric.removeprefix(EVAL_PREFIX).rpartition("/")
            found.setdefault(name, {})[figure] = value
    return [
        EvalResult(
            step=step,
            policy_version=step,
            name=name,
            num_problems=int(figures.get("num_problems", 0)),
            num_samples=int(figures.get("num_samples", 0)),
            values={figure: v for figure, v in figures.items() if figure not in ("num_problems", "num_samples")},
        )
        for name, figures in found.items()
    ]
