"""The life of a service process: `python -m beamline.<service> --run-dir DIR --worker NAME`.

Exit codes: 0 drained or done, 1 an unexpected error, 2 a setting to change, 3 no bus; 128 + signal when ended at once.
SIGTERM or SIGINT asks the service to drain; a second one, or one while it is starting, ends it at once. SIGUSR1 writes
the stacks of all threads to stderr.
"""

import argparse
import asyncio
import faulthandler
import logging
import os
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from beamline.protocol.config import RunConfig
from beamline.protocol.errors import BeamlineError, BusUnavailable, ConfigError
from beamline.protocol.messages import Heartbeat, ServiceFailed, Wait, WorkerState
from beamline.protocol.subjects import Subjects
from beamline.runtime.blob_store import BlobStore
from beamline.runtime.bus import Bus
from beamline.runtime.process_state import process_tree
from beamline.runtime.run_files import read_config
from beamline.runtime.step_metrics import Gauges, live_metrics
from beamline.runtime.waits import WAITS

log = logging.getLogger(__name__)

HEARTBEAT_EVERY_S = 2.0
DRAIN_S = 30.0
"""How long `main` may take to return after the first signal; then it is cancelled."""

EXIT_DONE, EXIT_FAILED, EXIT_CONFIG, EXIT_NO_BUS = 0, 1, 2, 3


class WorkerStatus:
    """What the heartbeat tells; the service keeps it up to date."""

    def __init__(self) -> None:
        self.policy_version = -1
        self.in_flight = 0
        self.started = asyncio.Event()
        """Set when the worker is no longer starting."""
        self._state = WorkerState.STARTING
        self._wait: Wait | None = None

    @property
    def waiting_for(self) -> str:
        """What keeps the worker from its work, in words; empty when nothing does."""
        return self._wait.what if self._wait else ""

    @waiting_for.setter
    def waiting_for(self, what: str) -> None:
        self.wait_for(what)

    def wait_for(self, what: str, on: Sequence[str] = ()) -> None:
        """As `waiting_for`, with the services that must act for it to end; repeating a wait does not begin it anew."""
        if what != self.waiting_for:
            self._wait = Wait(what=what, since=time.time(), until=0.0, on=list(on)) if what else None

    @property
    def waits(self) -> list[Wait]:
        """What keeps the worker from its work, then the oldest of its other waits."""
        return [*([self._wait] if self._wait else []), *WAITS.told()]

    @property
    def state(self) -> WorkerState:
        return self._state

    @state.setter
    def state(self, state: WorkerState) -> None:
        self._state = state
        if state is not WorkerState.STARTING:
            self.started.set()


@dataclass(frozen=True, kw_only=True)
class ServiceContext:
    """What a service is given to work with."""

    service: str
    worker: str
    incarnation: str
    """Changes with every start of the process."""
    config: RunConfig
    run_dir: Path
    bus: Bus
    blobs: BlobStore
    status: WorkerStatus = field(default_factory=WorkerStatus)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by the first signal."""
    gauges: list[Gauges] = field(default_factory=list[Gauges])
    """Asked for their present values with each heartbeat."""

    async def until_stopped(self, *loops: Coroutine[Any, Any, None]) -> None:
        """Run loops side by side until `stop` is set or one of them ends; then cancel the rest. Raises its error."""
        tasks = [asyncio.create_task(loop) for loop in loops]
        stopping = asyncio.create_task(self.stop.wait())
        try:
            done, _ = await asyncio.wait({*tasks, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopping}:
                task.result()
        finally:
            stopping.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


type ServiceMain = Callable[[ServiceContext], Awaitable[None]]


def run_service(service: str, main: ServiceMain, argv: Sequence[str] | None = None) -> NoReturn:
    """Run a service to its end and leave the process with its exit code.

    Args:
        service: coordinator, rollout, reward or trainer.
        main: the service; imports what is heavy when called, returns soon after `context.stop` is set.
        argv: command line without the program's name; None takes the process's own.
    """
    parser = argparse.ArgumentParser(prog=f"python -m beamline.{service}", description=f"Beamline's {service} service")
    parser.add_argument("--run-dir", type=Path, required=True, help="the run's folder, made by `beamline run`")
    parser.add_argument("--worker", default=f"{service}-0", help="name of this worker (default: %(default)s)")
    arguments = parser.parse_args(argv)
    from beamline.runtime.json_log import set_up_logging  # opentelemetry: not for --help

    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    set_up_logging(arguments.worker)
    log.info("%s starts as process %d", arguments.worker, os.getpid())
    code = asyncio.run(_live(service, arguments.worker, arguments.run_dir, main))
    sys.exit(code)


async def _live(service: str, worker: str, run_dir: Path, main: ServiceMain) -> int:
    try:
        context = await _connect(service, worker, run_dir)
    except ConfigError as error:
        return _say(EXIT_CONFIG, error)
    except BusUnavailable as error:
        return _say(EXIT_NO_BUS, error)
    from beamline.runtime.telemetry import stop_tracing

    _listen_to_signals(context)
    heart = asyncio.create_task(_beat(context))
    try:
        return await _run_main(context, main)
    finally:
        heart.cancel()
        await context.blobs.close()
        await context.bus.close()
        await asyncio.to_thread(stop_tracing)


async def _connect(service: str, worker: str, run_dir: Path) -> ServiceContext:
    from beamline.runtime.clients import open_clients  # nats: not for --help
    from beamline.runtime.telemetry import start_tracing

    config = read_config(run_dir)
    start_tracing(service, worker, config.run.name, run_dir, config.telemetry)
    subjects = Subjects(prefix=config.bus.prefix, run=config.run.name)
    bus, blobs = await open_clients(config, subjects, run_dir, service, name=worker)
    return ServiceContext(
        service=service,
        worker=worker,
        incarnation=uuid.uuid4().hex[:12],
        config=config,
        run_dir=run_dir,
        bus=bus,
        blobs=blobs,
    )


async def _run_main(context: ServiceContext, main: ServiceMain) -> int:
    """Run the service and turn its end into an exit code; an error's last word goes out on the bus."""
    running = asyncio.ensure_future(main(context))
    draining = asyncio.create_task(context.stop.wait())
    try:
        await asyncio.wait({running, draining}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            await asyncio.wait({running}, timeout=DRAIN_S)
        if not running.done():
            log.warning("%s did not drain within %g s and is cancelled", context.worker, DRAIN_S)
            running.cancel()
            await asyncio.wait({running}, timeout=DRAIN_S)
            return EXIT_DONE
        running.result()
        return EXIT_DONE
    except BusUnavailable as error:
        return _say(EXIT_NO_BUS, error)
    except ConfigError as error:
        await _report_failure(context, error, "")
        return _say(EXIT_CONFIG, error)
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        log.error("%s ends by an error", context.worker, exc_info=error)
        await _report_failure(context, error, text)
        return EXIT_FAILED
    finally:
        draining.cancel()


async def _report_failure(context: ServiceContext, error: Exception, text: str) -> None:
    message = str(error) if isinstance(error, BeamlineError) else f"{type(error).__name__}: {error}"
    failed = ServiceFailed(
        service=context.service, worker=context.worker, error=message[:10_000], traceback=text[-100_000:]
    )
    try:
        await context.bus.publish(failed)
    except BeamlineError as lost:
        log.error("could not report the failure on the bus: %s", lost)


async def _beat(context: ServiceContext) -> None:
    while True:
        status = context.status
        heartbeat = Heartbeat(
            service=context.service,
            worker=context.worker,
            incarnation=context.incarnation,
            pid=os.getpid(),
            state=WorkerState.DRAINING if context.stop.is_set() else status.state,
            policy_version=status.policy_version,
            in_flight=status.in_flight,
            rss_bytes=rss_bytes(),
            waiting_for=status.waiting_for,
            waits=status.waits,
        )
        try:
            await context.bus.publish(heartbeat)
            await context.bus.publish(live_metrics(heartbeat, context.gauges))
        except BeamlineError as error:
            log.warning("no heartbeat: %s", error)
        await _until_next_beat(heartbeat.state, status)


async def _until_next_beat(told: WorkerState, status: WorkerStatus) -> None:
    """A whole interval, but that a worker has started is told at once: a run's start waits for it."""
    if told is not WorkerState.STARTING:
        await asyncio.sleep(HEARTBEAT_EVERY_S)
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(HEARTBEAT_EVERY_S):
            await status.started.wait()


def rss_bytes() -> int:
    """Resident memory of this process and of all that it started; pages that they share count for each."""
    return sum(_rss_bytes(pid) for pid in process_tree(os.getpid()))


def _rss_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # it has ended meanwhile
        return 0


def _listen_to_signals(context: ServiceContext) -> None:
    def on_signal(number: int) -> None:
        if context.stop.is_set() or not context.status.started.is_set():
            os._exit(128 + number)
        log.info("%s drains after %s; a second one ends it at once", context.worker, signal.Signals(number).name)
        context.stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)


def _say(code: int, error: Exception) -> int:
    print(f"error: {error}", file=sys.stderr, flush=True)
    return code
