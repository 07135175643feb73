"""A run from its configuration to its end, with nothing left behind: processes, shared memory or a half-made folder."""

import asyncio
import os
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from beamline.coordinator.launch import preflight
from beamline.coordinator.launch.broker import choose_broker
from beamline.coordinator.launch.collector import say_if_away
from beamline.coordinator.launch.comeback import Comeback
from beamline.coordinator.launch.disk_room import check_room
from beamline.coordinator.launch.display import Display
from beamline.coordinator.launch.guard import Guard
from beamline.coordinator.launch.interrupt import Interrupted, Interrupts
from beamline.coordinator.launch.launcher import WorkerSpec
from beamline.coordinator.launch.local import Command, LocalLauncher, check_interpreters, service_command
from beamline.coordinator.launch.progress import Progress
from beamline.coordinator.launch.resume import check_named, newest_seen
from beamline.coordinator.launch.run_folder import RunFolder, rollout_threads, trainer_threads
from beamline.coordinator.launch.streams import make_streams
from beamline.coordinator.launch.supervisor import RestartPolicy, RunFailed, Supervisor, TrainerLost
from beamline.coordinator.launch.watch import watch
from beamline.coordinator.launch.watchdog import Watchdog
from beamline.coordinator.observe.view import RunView
from beamline.protocol.config import RunConfig
from beamline.protocol.messages import StopRequest
from beamline.protocol.subjects import Subjects
from beamline.runtime.nats_bus import NatsBus
from beamline.runtime.shm_blobs import sweep

DRAIN_DEADLINE_S = 20.0
"""How long services may take to end after the run's end, or after it was ended."""


async def run(
    config: RunConfig, display: Display, *, overwrite: bool = False, command: Command = service_command
) -> Path:
    """Check everything, start everything, and return the run's folder when the run has finished.

    Raises:
        ConfigError: something that the user has to change; nothing was started.
        RunFailed: a service could not be kept alive, with its last words.
        Interrupted: the user ended it.
    """
    check_interpreters()
    preflight.check(config)
    check_named(config)
    for remark in check_room(config):
        display.line(remark)
    Subjects(config.bus.prefix, config.run.name)
    folder = RunFolder.create(config, overwrite=overwrite)
    try:
        await keep_going(folder, folder.fill(config, display.line), display, command)
    except (RunFailed, Interrupted):
        if saved := newest_seen(config, folder.path):
            display.line(f"its newest checkpoint is {saved}: trainer.resume_mode=latest goes on from there")
        raise
    finally:
        folder.release()
    return folder.path


async def keep_going(folder: RunFolder, config: RunConfig, display: Display, command: Command) -> None:
    """Run a filled folder to the run's end, from its newest checkpoint whenever the trainer was lost."""
    policy = RestartPolicy()
    comeback = Comeback(policy, time.monotonic, display.line)
    while True:
        try:
            return await supervise(config, folder.path, display, command, policy)
        except TrainerLost as lost:
            config = folder.begin(config, comeback.origin(lost, config, folder.path))


async def supervise(
    config: RunConfig, run_dir: Path, display: Display, command: Command, policy: RestartPolicy
) -> None:
    """Run the services of a filled folder to the run's end; whatever happens, all of them have ended on return.

    Raises:
        TrainerLost: the trainer ended before the run, and nobody had asked the run to end.
        RunFailed: another service could not be kept alive.
        Interrupted: the user ended it.
    """
    subjects = Subjects(config.bus.prefix, config.run.name)
    started = time.monotonic()
    specs, view = worker_specs(config, run_dir), RunView(config.trainer.num_steps)
    progress = Progress(view, now=lambda: time.monotonic() - started, num_workers=len(specs))
    async with AsyncExitStack() as stack:
        stack.callback(Interrupts.uninstall)
        guard = await Guard.start(subjects, run_dir)
        stack.push_async_callback(guard.close)
        stack.callback(sweep, subjects, run_dir)
        broker = choose_broker(config.bus, run_dir, subjects, guard, policy, display.line)
        stack.push_async_callback(broker.stop)
        credentials = await broker.start()
        await make_streams(config, subjects, run_dir)
        display.line(f"{progress.elapsed()}  nats-server is ready at {credentials.url}")
        await say_if_away(config.telemetry.otlp_endpoint, display.line)
        launcher = LocalLauncher(guard, os.environ, command)
        stack.push_async_callback(launcher.stop, DRAIN_DEADLINE_S)
        bus = await NatsBus.connect(credentials, subjects, name="launcher")
        stack.push_async_callback(bus.close)
        supervisor = Supervisor(launcher, policy, display.line, now=time.monotonic, done=lambda: is_done(view, run_dir))
        interrupts = Interrupts(lambda: bus.request(StopRequest()), display.line)
        interrupts.install()
        watchdog = Watchdog(guard.table, run_dir / "logs", config.telemetry.silent_s, display.line)
        stack.enter_context(display.shown())
        try:
            await _first_end(
                supervisor.run(specs),
                broker.keep(),
                _ended_by(interrupts),
                beside=watch(bus, progress, display, watchdog),
            )
        except TrainerLost as lost:
            raise lost.ends("the run had been asked to end") if interrupts.asked else lost from None


def is_done(view: RunView, run_dir: Path) -> bool:
    """Whether the coordinator has said so, or has written the run's summary."""
    return view.is_done or (run_dir / "summary.json").is_file()


def worker_specs(config: RunConfig, run_dir: Path) -> list[WorkerSpec]:
    """Every worker of a run. Services that take turns may each use all threads of the machine."""

    def spec(service: str, worker: str, threads: int) -> WorkerSpec:
        return WorkerSpec(service=service, worker=worker, run_dir=run_dir, threads=threads)

    rollouts = [spec("rollout", f"rollout-{i}", rollout_threads(config)) for i in range(config.rollout.replicas)]
    trainer = spec("trainer", "trainer", trainer_threads(config))
    return [spec("coordinator", "coordinator", 1), spec("reward", "reward", 1), trainer, *rollouts]


async def _ended_by(interrupts: Interrupts) -> None:
    await interrupts.wait()
    raise Interrupted("the run was interrupted; its folder keeps what was written so far")


async def _first_end(*tasks: Coroutine[Any, Any, None], beside: Coroutine[Any, Any, None]) -> None:
    """Run all together until the first of `tasks` ends, and raise what it raised; the others are cancelled."""
    running = [asyncio.create_task(task) for task in tasks]
    watcher = asyncio.create_task(beside)
    try:
        ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        for task in (*running, watcher):
            task.cancel()
        await asyncio.gather(*running, watcher, return_exceptions=True)
