"""What a run's folder tells, read as it grows: each byte once, and of long logs the end alone."""

from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from beamline.coordinator.dashboard.recent_spans import RecentSpans
from beamline.coordinator.dashboard.tail import Tail
from beamline.coordinator.launch.run_folder import in_use
from beamline.coordinator.metrics_file import MetricsLine
from beamline.coordinator.observe.log_lines import LogReader
from beamline.coordinator.summary import (
    Artifacts,
    Evaluation,
    LedgerCounts,
    StepValues,
    Summary,
    fold,
    iso,
    read_summary,
    timing_total,
    tokens_per_s,
)
from beamline.protocol.errors import ConfigError
from beamline.runtime.json_log import LogLine
from beamline.runtime.run_files import read_config

NEWEST_LOG_BYTES = 1 << 20
NUM_ERRORS = 20
ERROR_LEVELS = ("ERROR", "CRITICAL")
RUNNING, BROKEN_OFF = "running", "broken off"

_LEAVES = {
    "config.json": "how many steps the run was to take is not known",
    "metrics.jsonl": "figures are those of summary.json alone",
    "summary.json": "figures are those of metrics.jsonl alone, and the run may have been killed",
    "logs": "no errors out of logs",
    "traces": "no timeline (telemetry.traces=false leaves none)",
    "samples": "no completions of steps (telemetry.kept_groups=0 leaves none)",
}
"""What a run leaves, and what is not shown without it."""

_metrics_line = msgspec.json.Decoder(MetricsLine)


class RunFiles:
    """A run by its folder, which may be half written, or half removed.

    Args:
        run_dir: the folder; that it exists is not asked for.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.is_live = False
        """Whether a launcher holds the folder."""
        self.num_steps = 0
        """Of the whole run; 0 where nothing tells."""
        self.spans = RecentSpans(run_dir)
        self.errors: list[LogLine] = []
        """The newest, oldest first."""
        self.num_damaged = 0
        """Lines of metrics.jsonl that are none."""
        self.summary_error = ""
        """Why summary.json cannot be read, where it is there."""
        self._metrics = Tail(run_dir / "metrics.jsonl")
        self._num_replaced = 0
        self._evaluations: dict[tuple[int, str], dict[str, float]] = {}
        self._steps: dict[int, dict[str, float]] = {}
        self._logs: dict[str, tuple[Tail, LogReader]] = {}
        self._ended: Summary | None = None
        self._stamps: dict[str, int] = {}
        """When each part was written last, in Unix nanoseconds; 0 where it is not there."""
        self._begun = 0.0
        self._last_record = 0.0
        """When the newest of metrics.jsonl was written, Unix seconds."""
        self._so_far: Summary | None = None

    def poll(self) -> set[str]:
        """Read what is new; returns which of metrics, spans, errors, samples, life and folder it is."""
        found = {name for name, read in self._parts().items() if read()}
        if self.is_live or found:
            was, self.is_live = self.is_live, in_use(self.run_dir)
            found |= {"life"} if was != self.is_live else set()
        if found & {"metrics", "summary", "life", "folder"}:
            self._so_far = None
        return found

    def summary(self) -> Summary:
        """The run as its summary has it once it is over; before that, or without one, as its metrics have it so far."""
        if self._ended is not None and not self.is_live:
            return self._ended
        if self._so_far is None:
            self._so_far = self._sum_up()
        return self._so_far

    def _sum_up(self) -> Summary:
        steps = [StepValues(step=step, values=values) for step, values in sorted(self._steps.items())]
        return Summary(
            run=self.run_dir.name,
            status=RUNNING if self.is_live else BROKEN_OFF,
            started=iso(self._begun),
            finished="",
            duration_s=max(0.0, self._last_record - self._begun) if self._begun else 0.0,
            config={},
            evaluations=[
                Evaluation(step=step, name=name, values=values)
                for (step, name), values in sorted(self._evaluations.items(), key=lambda item: item[0][0])
            ],
            steps=steps,
            timing_total=timing_total(steps),
            tokens_per_s=tokens_per_s(steps),
            ledger=_ledger(steps),
            versions={},
            artifacts=Artifacts(report="", metrics="", logs="", checkpoint="", evals=""),
        )

    def sampled_steps(self) -> list[int]:
        """Steps of which completions were kept, in order."""
        names = (
            path.stem.removeprefix("global_step_") for path in (self.run_dir / "samples").glob("global_step_*.jsonl")
        )
        return sorted(int(name) for name in names if name.isdigit())

    def missing(self) -> list[str]:
        """What an ended run should have left and did not, each with what is not shown for it."""
        if self.is_live:
            return []
        found = [f"{name} is missing: {lost}" for name, lost in _LEAVES.items() if not (self.run_dir / name).exists()]
        if self.summary_error:
            found.append(self.summary_error)
        if self.num_damaged:
            found.append(f"metrics.jsonl has {self.num_damaged} damaged lines, which are left out")
        if self.spans.num_damaged:
            found.append(f"traces has {self.spans.num_damaged} damaged lines, which are left out")
        return found

    def _parts(self) -> dict[str, Callable[[], bool]]:
        return {
            "metrics": self._read_metrics,
            "spans": self.spans.poll,
            "errors": self._read_logs,
            "samples": lambda: self._changed("samples"),
            "folder": lambda: self._read_config() | self._changed(""),
            "summary": self._read_summary,
        }

    def _read_metrics(self) -> bool:
        lines = self._metrics.new()
        if self._metrics.num_replaced > self._num_replaced:
            self._num_replaced = self._metrics.num_replaced
            self._steps, self._evaluations = {}, {}
        records = [record for line in lines if (record := self._record(line)) is not None]
        self._last_record = max([self._last_record, *(record.time for record in records)])
        evaluations, steps = fold(records)
        for evaluation in evaluations:
            self._evaluations.setdefault((evaluation.step, evaluation.name), {}).update(evaluation.values)
        for step in steps:
            self._steps.setdefault(step.step, {}).update(step.values)
        return bool(lines)

    def _record(self, line: bytes) -> MetricsLine | None:
        try:
            return _metrics_line.decode(line)
        except msgspec.DecodeError:
            self.num_damaged += 1
            return None

    def _read_summary(self) -> bool:
        path = self.run_dir / "summary.json"
        if not self._changed(path.name):
            return False
        self._ended, self.summary_error = None, ""
        if path.is_file():
            try:
                self._ended = read_summary(path)
            except ConfigError as error:
                self.summary_error = str(error)
        return True

    def _read_config(self) -> bool:
        path = self.run_dir / "config.json"
        if not self._changed(path.name) or not path.is_file():
            return False
        self._begun = path.stat().st_mtime
        try:
            self.num_steps = read_config(self.run_dir).trainer.num_steps
        except ConfigError:
            self.num_steps = 0
        return True

    def _read_logs(self) -> bool:
        new: list[LogLine] = []
        for path in sorted((self.run_dir / "logs").glob("*.log")):
            if path.name not in self._logs:
                self._logs[path.name] = Tail(path, NEWEST_LOG_BYTES), LogReader(path.stem)
            log, reader = self._logs[path.name]
            new += [found for line in log.new() for found in reader.read(line) if found.level in ERROR_LEVELS]
        if new:
            self.errors = sorted([*self.errors, *_joined(new)], key=lambda line: line.time)[-NUM_ERRORS:]
        return bool(new)

    def _changed(self, name: str) -> bool:
        """Whether a file or folder was written, or has come or gone, since this was last asked."""
        try:
            stamp = (self.run_dir / name).stat().st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            stamp = 0
        known = self._stamps.get(name, 0)
        self._stamps[name] = stamp
        return stamp != known


def _ledger(steps: list[StepValues]) -> LedgerCounts:
    """As the newest step that tells left it."""
    names = LedgerCounts.__struct_fields__
    told = next((step.values for step in reversed(steps) if "ledger/issued" in step.values), {})
    return LedgerCounts(**{name: int(told.get(f"ledger/{name}", 0)) for name in names})


def _joined(lines: list[LogLine]) -> list[LogLine]:
    """Lines that a worker printed one after the other, as a traceback is, are one."""
    found: list[LogLine] = []
    for line in lines:
        if found and not line.logger and not found[-1].logger and found[-1].worker == line.worker:
            found[-1] = replace(found[-1], message=f"{found[-1].message}\n{line.message}")
        else:
            found.append(line)
    return found
