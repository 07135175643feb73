"""Every number of a run where it is kept: the newest of each name in memory, the live ones in `gauges.jsonl` too.

Steps and evaluations come from the recorder, of which this is a logger; what rollout and reward say of a step is given
to the recorder; live numbers are heard on the bus.
"""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from beamline.coordinator.observe.gauge_lines import GaugeLine
from beamline.protocol.errors import BeamlineError
from beamline.protocol.messages import Message, Metrics

log = logging.getLogger(__name__)

KEEP_EVERY_S = 5.0
"""At most one line a worker in so long: a day of a worker is then some megabytes."""
FORGET_AFTER_S = 60.0
"""A worker that told nothing for so long has no present values any more."""
OWN_STEPS = ("rollout", "reward")
"""Services whose numbers of a step are in no other message; the trainer's are in its policy update."""


class RecordsSteps(Protocol):
    """What of the recorder is used here."""

    def record_step(self, step: int, values: Mapping[str, float]) -> None:
        """As `Recorder.record_step`."""
        ...


class Numbers:
    """A listener of the run's metrics, and a logger of its recorder.

    Args:
        path: of `gauges.jsonl`.
        now: Unix time in seconds.
    """

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        self._path = path
        self._now = now
        self._recorded: dict[str, tuple[float, float]] = {}
        """Of each name, when it was recorded last, and its value."""
        self._live: dict[str, Metrics] = {}
        self._heard: dict[str, float] = {}
        self._kept: dict[str, float] = {}
        self._is_broken = False

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Take a record of a step or of an evaluation."""
        self._recorded |= {name: (time, value) for name, value in values.items()}

    def close(self) -> None:
        """Nothing is held open."""

    def latest(self) -> dict[str, float]:
        """The newest value of each name, recorded or live. Safe to call from another thread."""
        newest, oldest = dict(self._recorded), self._now() - FORGET_AFTER_S
        for worker, message in list(self._live.items()):
            heard = self._heard[worker]
            if heard >= oldest:
                live = {name: (heard, value) for name, value in message.values.items()}
                newest |= {name: told for name, told in live.items() if name not in newest or told >= newest[name]}
        return {name: value for name, (_, value) in newest.items()}

    async def hear(self, message: Message, recorder: RecordsSteps) -> None:
        """Take a message of the metrics' subjects."""
        if not isinstance(message, Metrics):
            return
        if message.step >= 0:
            self._record(message, recorder)
            return
        now = self._now()
        self._heard[message.worker] = now
        self._live[message.worker] = message
        if now - self._kept.get(message.worker, 0.0) >= KEEP_EVERY_S:
            self._kept[message.worker] = now
            self._keep(message, now)

    def _record(self, message: Metrics, recorder: RecordsSteps) -> None:
        if message.service not in OWN_STEPS or not message.values:
            return
        try:
            recorder.record_step(message.step, message.values)
        except BeamlineError as error:
            log.error("numbers of %s are left out: %s", message.worker, error)

    def _keep(self, message: Metrics, now: float) -> None:
        line = GaugeLine(time=now, service=message.service, worker=message.worker, values=message.values)
        try:
            with self._path.open("ab", buffering=0) as file:
                file.write(msgspec.json.encode(line) + b"\n")
        except OSError as error:
            if not self._is_broken:
                log.error("live numbers are no longer kept in %s: %s", self._path, error)
            self._is_broken = True
        else:
            self._is_broken = False
