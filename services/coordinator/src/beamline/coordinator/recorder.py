"""The run's memory on disk: metrics as they come, evaluation dumps, and at the end the summary and the report."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from beamline.coordinator.eval_dumps import Completion, dump_path, write_completions
from beamline.coordinator.loggers import Logger
from beamline.coordinator.metrics_file import MetricsFile
from beamline.coordinator.report.page import write_report
from beamline.coordinator.samples import SampleFiles
from beamline.coordinator.summary import (
    EVAL_PREFIX,
    Artifacts,
    LedgerCounts,
    Summary,
    fold,
    iso,
    timing_total,
    tokens_per_s,
    write_summary,
)
from beamline.protocol.config import RunConfig
from beamline.protocol.errors import BeamlineError
from beamline.protocol.messages import EvalResult, ScoredGroup


class Recorder:
    """Writes one run's folder.

    Opening a folder that already holds the run goes on where it stopped: the summary covers all of it.

    Args:
        run_dir: `<run.dir>/<run.name>`; made when missing.
        config: shown in the summary.
        loggers: told every record after it is on disk.
        versions: library versions by service, for the summary.
        samples: keeps completions of each step; None keeps none.
        now: Unix time in seconds.
    """

    def __init__(
        self,
        run_dir: Path,
        config: RunConfig,
        loggers: Sequence[Logger] = (),
        versions: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
        samples: SampleFiles | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.run_dir = run_dir
        self._config = config
        self._loggers = loggers
        self._versions = versions
        self._samples = samples
        self._now = now
        self._metrics = MetricsFile(run_dir / "metrics.jsonl")
        self._opened = now()

    def record_step(self, step: int, values: Mapping[str, float]) -> None:
        """Append a step's values; a step may be told in parts, and told again.

        Raises:
            BeamlineError: a value that is not a finite number; nothing of the record is kept.
        """
        self._record(step, values)

    def keep_step(self, step: int, values: Mapping[str, float]) -> None:
        """Put on disk what of a step would end with this process; loggers hear of it when the step is recorded.

        Raises:
            BeamlineError: as `record_step`.
        """
        self._metrics.log(step, self._now(), _finite(step, values))

    async def keep_samples(self, step: int, groups: Sequence[ScoredGroup]) -> None:
        """Write completions of a step's groups down, while their blobs are there. What goes wrong is only logged."""
        if self._samples is not None:
            await self._samples.keep(step, groups)

    def record_eval(self, result: EvalResult, completions: Iterable[Completion | dict[str, Any]]) -> None:
        """Dump the completions of an evaluated data source, then record its values under `eval/<name>/`.

        Raises:
            BeamlineError: a value that is not a finite number.
            ConfigError: a completion that lacks a field or has an unknown one.
        """
        counts = {"num_problems": result.num_problems, "num_samples": result.num_samples}
        values = {f"{EVAL_PREFIX}{result.name}/{short}": v for short, v in (result.values | counts).items()}
        finite = _finite(result.step, values)
        write_completions(dump_path(self.run_dir / "evals", result.step, result.name), completions)
        self._record(result.step, finite)

    def finish(
        self,
        status: str,
        ledger: Mapping[str, int],
        checkpoint: str = "",
        export: str = "",
        started: float | None = None,
    ) -> Summary:
        """Write `summary.json` and `report.html`, each as a whole.

        Args:
            status: such as "finished", "stopped" or "failed".
            ledger: group counts, with the fields of `LedgerCounts`.
            checkpoint: path of the newest whole checkpoint; empty when there is none.
            export: path of the newest export, likewise.
            started: Unix time in seconds of the run's first start; None takes the oldest record's.
        """
        lines = self._metrics.read()
        begin = min([self._opened, *(line.time for line in lines)]) if started is None else started
        evaluations, steps = fold(lines)
        end = self._now()
        summary = Summary(
            run=self._config.run.name,
            status=status,
            started=iso(begin),
            finished=iso(end),
            duration_s=round(end - begin, 3),
            config=msgspec.to_builtins(self._config),
            evaluations=evaluations,
            steps=steps,
            timing_total=timing_total(steps),
            tokens_per_s=tokens_per_s(steps),
            ledger=msgspec.convert(dict(ledger), LedgerCounts),
            versions={service: dict(libraries) for service, libraries in self._versions.items()},
            artifacts=self._artifacts(checkpoint, export),
        )
        write_summary(self.run_dir / "summary.json", summary)
        write_report(self.run_dir)
        return summary

    def close(self) -> None:
        """Nothing more comes: let the loggers write what they have. May take seconds."""
        for logger in self._loggers:
            logger.close()

    def _record(self, step: int, values: Mapping[str, float]) -> None:
        finite, now = _finite(step, values), self._now()
        for logger in (self._metrics, *self._loggers):
            logger.log(step, now, finite)

    def _artifacts(self, checkpoint: str, export: str) -> Artifacts:
        return Artifacts(
            report=str(self.run_dir / "report.html"),
            metrics=str(self.run_dir / "metrics.jsonl"),
            logs=str(self.run_dir / "logs"),
            checkpoint=checkpoint,
            export=export,
            evals=str(self.run_dir / "evals"),
            traces=str(self.run_dir / "traces") if self._config.telemetry.traces else "",
        )


def _finite(step: int, values: Mapping[str, float]) -> dict[str, float]:
    for name, value in values.items():
        if not math.isfinite(value):
            raise BeamlineError(
                f"metric {name} of step {step} is {value}, which is not a finite number: "
                "leave out what was not measured; if the training diverged, lower trainer.optimizer.lr"
            )
    return {name: float(value) for name, value in values.items()}
