"""The logs of a run's workers, put together by time, whole or as they grow."""

import asyncio
import difflib
import heapq
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from beamline.coordinator.launch.run_end import run_end
from beamline.coordinator.launch.run_folder import in_use
from beamline.coordinator.observe.follow import until_set_up
from beamline.coordinator.observe.log_lines import LEVELS, LogReader
from beamline.protocol.errors import ConfigError
from beamline.runtime.json_log import LogLine

FOLLOW_EVERY_S = 0.25

type Print = Callable[[LogLine], None]


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which records are shown."""

    who: str = ""
    """A worker, or a service for all of its workers; empty for everyone."""
    step: int | None = None
    level: str = "DEBUG"
    """The least one."""

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ConfigError(f"--level={self.level}: it is one of {', '.join(LEVELS)}")

    def takes(self, record: LogLine) -> bool:
        """Whether a record of one of the wanted logs is shown. A level that nobody knows counts as INFO."""
        level = record.level if record.level in LEVELS else "INFO"
        loud = LEVELS.index(level) >= LEVELS.index(self.level)
        return loud and (self.step is None or record.step == self.step)


class GrowingLog:
    """One worker's log, read as far as it goes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader = LogReader(path.stem)
        self._position = 0

    def read(self, *, to_end: bool) -> Iterator[LogLine]:
        """What has been added since the last call; a line without its end is left for the next one unless `to_end`."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self._position)
            yield from self._read(file, to_end)

    def _read(self, file: BinaryIO, to_end: bool) -> Iterator[LogLine]:
        for line in file:
            if not line.endswith(b"\n") and not to_end:
                return
            self._position += len(line)
            yield from self._reader.read(line.rstrip(b"\n"))


class RunLogs:
    """The wanted logs of one run; workers that come later are taken in.

    Raises:
        ConfigError: the run has no logs, or none of that name; with the nearest name.
    """

    def __init__(self, run_dir: Path, wanted: Wanted) -> None:
        self._folder = run_dir / "logs"
        self._wanted = wanted
        self._logs: dict[str, GrowingLog] = {}
        names = self._names()
        if not names:
            raise ConfigError(f"run {run_dir.name} has no logs: {self._folder} is missing or empty")
        if not _chosen(names, wanted.who):
            nearest = difflib.get_close_matches(wanted.who, names, n=1, cutoff=0.4)
            hint = f"the nearest is {nearest[0]!r}" if nearest else f"it has {', '.join(names)}"
            raise ConfigError(f"run {run_dir.name} has no log of {wanted.who!r}: {hint}")

    def read(self, *, to_end: bool) -> Iterator[LogLine]:
        """What is new in all of them, by time."""
        for name in _chosen(self._names(), self._wanted.who):
            self._logs.setdefault(name, GrowingLog(self._folder / f"{name}.log"))
        added = (log.read(to_end=to_end) for log in self._logs.values())
        return filter(self._wanted.takes, heapq.merge(*added, key=lambda record: record.time))

    def _names(self) -> list[str]:
        return sorted(path.stem for path in self._folder.glob("*.log"))


async def show_logs(run_dir: Path, wanted: Wanted, show: Print, *, follow: bool) -> None:
    """Show what there is and, if it is to be followed, what comes until the run ends. Raises as `RunLogs` does."""
    if follow:
        await until_set_up(run_dir)
    logs = RunLogs(run_dir, wanted)
    if follow and in_use(run_dir):
        _show(logs.read(to_end=False), show)
        ended = run_end(run_dir)
        while not ended.done():
            await asyncio.wait({ended}, timeout=FOLLOW_EVERY_S)
            _show(logs.read(to_end=False), show)
    _show(logs.read(to_end=True), show)


def _show(records: Iterable[LogLine], show: Print) -> None:
    for record in records:
        show(record)


def _chosen(names: list[str], who: str) -> list[str]:
    """The workers of that name, or of the service of that name."""
    of_service = re.compile(rf"{re.escape(who)}-\d+")
    return [name for name in names if who in ("", name) or of_service.fullmatch(name)]
