"""Names workers that have fallen silent, and has them write all their stacks to their logs.

A worker is silent without a heartbeat for `telemetry.silent_s`. SIGUSR1 makes faulthandler write the stacks of all
threads; it goes to the worker's process and to those that it started (ranks, an engine's core), if they catch it.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from beamline.coordinator.launch.process_table import BROKER, LAUNCHER, ProcessTable
from beamline.protocol.messages import Heartbeat
from beamline.runtime.process_state import catches, look_at, process_tree, stop_in_words, stopped_in

LOOKS = 4
"""In the time that makes a silence."""


class Watchdog:
    """Consumes heartbeats; says each silence once, and its end.

    Args:
        table: the run's processes.
        logs: the folder of the workers' logs.
        silent_s: a worker without a heartbeat for so long is silent.
        notify: shows a line.
    """

    def __init__(self, table: ProcessTable, logs: Path, silent_s: float, notify: Callable[[str], None]) -> None:
        self._table = table
        self._logs = logs
        self._silent_s = silent_s
        self._notify = notify
        self._heard: dict[str, float] = {}
        """By worker, the monotonic time of its last heartbeat."""
        self._named: dict[str, int] = {}
        """Those whose present silence was told, with the process that it is of."""

    def hear(self, heartbeat: Heartbeat) -> None:
        """A sign of life."""
        self._heard[heartbeat.worker] = time.monotonic()
        if self._named.pop(heartbeat.worker, None) is not None:
            self._notify(f"{heartbeat.worker} is heard of again")

    async def run(self) -> None:
        """Look, again and again, until cancelled."""
        while True:
            await asyncio.sleep(self._silent_s / LOOKS)
            self.look()

    def look(self) -> None:
        """Name whoever has become silent. While the broker is stopped, it alone is named: nobody can be heard."""
        pids = self._table.pids
        if BROKER in pids and (stopped := stopped_in(pids[BROKER])):
            if self._is_news(BROKER, pids[BROKER]):
                self._notify(f"nats-server passes nothing on: {stop_in_words(stopped[0], pids[BROKER])}")
            return
        self._named.pop(BROKER, None)
        for worker, pid in pids.items():
            silence_s = self._silence_s(worker)
            is_silent = worker not in (LAUNCHER, BROKER) and silence_s > self._silent_s and look_at(pid) is not None
            if is_silent and self._is_news(worker, pid):
                self._notify(f"{worker} has not sent a heartbeat for {silence_s:.0f} s: {self._find_out(worker, pid)}")

    def _silence_s(self, worker: str) -> float:
        """Since its last heartbeat, or since this process of it was started."""
        last = max(self._heard.get(worker, 0.0), self._table.noted_s[worker])
        return time.monotonic() - last

    def _is_news(self, worker: str, pid: int) -> bool:
        known, self._named[worker] = self._named.get(worker), pid
        return known != pid

    def _find_out(self, worker: str, pid: int) -> str:
        if stopped := stopped_in(pid):
            return stop_in_words(stopped[0], pid)
        asked = [one for one in process_tree(pid) if catches(one, signal.SIGUSR1)]
        for one in asked:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGUSR1)
        if not asked:
            return f"its process {pid} does not say where it is"
        processes = ", ".join(map(str, asked))
        return f"the stacks of its threads (process {processes}) are in {self._logs / f'{worker}.log'}"
