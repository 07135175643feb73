"""Collects what can be seen of a run from outside: bus (for a few seconds), processes, stores, logs and folder."""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from beamline.coordinator.doctor.stuck_facts import Facts, StoreFacts, WorkerFacts
from beamline.coordinator.launch.process_table import BROKER, LAUNCHER, PROCESSES_FILE, read_processes
from beamline.coordinator.launch.run_folder import in_use
from beamline.coordinator.observe.log_lines import tail
from beamline.protocol.config import RunConfig
from beamline.protocol.errors import BeamlineError, ConfigError
from beamline.protocol.messages import Heartbeat, Message, ServiceFailed, StatusReply, StatusRequest
from beamline.protocol.subjects import Subjects
from beamline.runtime.bus import Bus
from beamline.runtime.credentials import credentials_path, read_credentials
from beamline.runtime.nats_bus import NatsBus
from beamline.runtime.process_state import look_at, stopped_in
from beamline.runtime.run_files import read_config
from beamline.runtime.shm_blobs import shm_root

LISTEN_S = 5.0
"""Two heartbeats and a half."""
ANSWER_S = 3.0
NUM_LAST_LINES = 40
NUM_TAIL_BYTES = 16 * 1024
_CLOCK_SLACK_S = 2.0


class Ear:
    """What was heard on the bus."""

    def __init__(self) -> None:
        self.beats: dict[str, tuple[float, Heartbeat]] = {}
        """By worker: when its newest heartbeat came (Unix seconds), and that."""
        self.failures: list[ServiceFailed] = []
        self.status: StatusReply | None = None
        self.coordinator_error = ""
        self.moved = False

    async def hear(self, message: Message) -> None:
        match message:
            case Heartbeat():
                self.beats[message.worker] = (time.time(), message)
            case ServiceFailed():
                self.failures.append(message)
            case _:
                pass

    def answered(self, status: StatusReply) -> None:
        """The coordinator's answer, at the beginning or at the end."""
        before, self.status = self.status, status
        self.moved = before is not None and _place(before) != _place(status)


async def gather(run_dir: Path) -> Facts:
    """Look at a live run. Raises ConfigError for one that has ended, or whose configuration is gone."""
    if not in_use(run_dir):
        raise ConfigError(f"run {run_dir.name} has ended: `beamline status {run_dir.name}` shows what it came to")
    config = read_config(run_dir)
    pids = read_processes(run_dir)
    broker = None if config.bus.url else _process(BROKER, pids.get(BROKER), run_dir)
    ear = Ear()
    is_away = broker is not None and (bool(broker.stopped) or broker.has_ended)
    bus_error = f"its process {broker.pid} does not run" if broker and is_away else await _listen(run_dir, config, ear)
    names = (pids.keys() | ear.beats.keys() | _told(ear.status).keys()) - {LAUNCHER, BROKER}
    return Facts(
        run=run_dir.name,
        now=time.time(),
        listened_s=0.0 if bus_error else LISTEN_S,
        bus_error=bus_error,
        status=ear.status,
        coordinator_error=ear.coordinator_error,
        moved=ear.moved,
        workers=[_worker(name, pids, ear, run_dir) for name in sorted(names)],
        broker=broker,
        launcher=_process(LAUNCHER, pids.get(LAUNCHER), run_dir),
        stores=list(_stores(config, run_dir)),
        failures=ear.failures,
        missing=_missing_files(run_dir),
    )


async def _listen(run_dir: Path, config: RunConfig, ear: Ear) -> str:
    """Listen, and ask the coordinator at the beginning and at the end; returns why that could not be done."""
    try:
        credentials = read_credentials(run_dir, "cli")
        subjects = Subjects(config.bus.prefix, config.run.name)
        bus = await NatsBus.connect(credentials, subjects, connect_deadline_s=ANSWER_S)
    except BeamlineError as error:
        return str(error)
    hearing = [
        asyncio.create_task(bus.subscribe(subject, ear.hear)) for subject in (subjects.heartbeat(), subjects.error())
    ]
    try:
        await _ask(bus, ear)
        await asyncio.wait(hearing, timeout=LISTEN_S)
        await _ask(bus, ear)
    finally:
        for task in hearing:
            task.cancel()
        await asyncio.gather(*hearing, return_exceptions=True)
        await bus.close()
    return ""


async def _ask(bus: Bus, ear: Ear) -> None:
    try:
        reply = await bus.request(StatusRequest(), ANSWER_S)
    except BeamlineError as error:
        ear.coordinator_error = f"the coordinator does not answer: {error}"
    else:
        assert isinstance(reply, StatusReply)
        ear.answered(reply)


def _worker(name: str, pids: dict[str, int], ear: Ear, run_dir: Path) -> WorkerFacts:
    """A worker by its process, its newest heartbeat and the end of its log."""
    heard_at, heartbeat = ear.beats.get(name, (None, _told(ear.status).get(name)))
    silence_s = ear.status.silences_s.get(name) if ear.status else None
    # Without the launcher's notes, its heartbeat tells the process.
    pid = pids.get(name) or (heartbeat.pid if heartbeat and not pids else None)
    return replace(
        _process(name, pid, run_dir),
        heartbeat=heartbeat,
        silence_s=time.time() - heard_at if heard_at else silence_s,
    )


def _process(name: str, pid: int | None, run_dir: Path) -> WorkerFacts:
    """A process of the run, and the end of its log. Another process that has got its pid since is none."""
    log = run_dir / "logs" / ("nats.log" if name == BROKER else f"{name}.log")
    process = look_at(pid) if pid is not None else None
    table = run_dir / PROCESSES_FILE
    if process is not None and table.is_file():
        is_younger = time.time() - process.age_s > table.stat().st_mtime + _CLOCK_SLACK_S
        process = None if is_younger else process
    stopped = stopped_in(process.pid) if process is not None else []
    return WorkerFacts(
        name=name,
        pid=pid,
        process=process,
        # The launcher has started all the others, which are looked at by themselves.
        stopped=[one for one in stopped if name != LAUNCHER or one.pid == pid],
        log=str(log),
        last_lines=[line for line in tail(log, NUM_TAIL_BYTES) if line.strip()][-NUM_LAST_LINES:],
    )


def _stores(config: RunConfig, run_dir: Path) -> Iterator[StoreFacts]:
    """The file systems of blobs and of the broker's streams, which may be the same."""
    blobs = shm_root(Subjects(config.bus.prefix, config.run.name), run_dir)
    places = {"messages": run_dir / "jetstream"}
    if config.bus.blob_store != "jetstream":
        places["blobs"] = blobs if blobs.exists() else blobs.parent
    for holds, path in places.items():
        with suppress(FileNotFoundError):  # the streams of a broker of the user's own lie elsewhere
            space = os.statvfs(path)
            yield StoreFacts(
                holds=holds,
                path=str(path),
                num_bytes=space.f_blocks * space.f_frsize,
                free_bytes=space.f_bavail * space.f_frsize,
            )


def _missing_files(run_dir: Path) -> list[str]:
    """What a live run's folder has, and this one has not."""
    expected = [run_dir / PROCESSES_FILE, run_dir / "logs", credentials_path(run_dir, "cli")]
    return [str(path.relative_to(run_dir)) for path in expected if not path.exists()]


def _told(status: StatusReply | None) -> dict[str, Heartbeat]:
    return {beat.worker: beat for beat in status.workers} if status else {}


def _place(status: StatusReply) -> tuple[object, ...]:
    return status.step, status.phase, status.phase_since, status.ledger
