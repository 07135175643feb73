"""The life of a service process: arguments, heartbeat, drain, and an exit code and a plain line for every end."""

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import TracerProvider

from beamline.coordinator.observe.log_lines import read_lines
from beamline.protocol import messages as m
from beamline.protocol.config import BusSection, RunConfig, RunSection
from beamline.runtime.deadline import deadline
from beamline.runtime.run_files import read_config, write_config
from beamline.runtime.service import HEARTBEAT_EVERY_S
from beamline.runtime.shm_blobs import sweep
from beamline.runtime.trace_context import STEP
from brokers import SUBJECTS, NatsBroker, Tasks
from tiny_service import START_S
from wire_examples import MESSAGES

TINY_SERVICE = Path(__file__).parents[1] / "support" / "tiny_service.py"
CONFIG = RunConfig(run=RunSection(name=SUBJECTS.run), bus=BusSection(prefix=SUBJECTS.prefix))


@pytest_asyncio.fixture
async def run_dir(nats: NatsBroker) -> AsyncIterator[Path]:
    write_config(nats.server.run_dir, CONFIG)
    yield nats.server.run_dir
    sweep(SUBJECTS, nats.server.run_dir)


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, str(TINY_SERVICE), *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


async def end_of(process: asyncio.subprocess.Process) -> tuple[int, str]:
    """Exit code and what it wrote to stderr."""
    async with deadline(20, "the service to end"):
        _, stderr = await process.communicate()
    assert process.returncode is not None
    return process.returncode, stderr.decode()


class Listener:
    """The messages of one subject, until one satisfies."""

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[m.Message] = asyncio.Queue()

    async def __call__(self, message: m.Message) -> None:
        self.arrived.put_nowait(message)

    async def next(self, what: str) -> m.Message:
        async with deadline(20, what):
            return await self.arrived.get()


async def of_a_ready_worker(beats: Listener) -> m.Heartbeat:
    heartbeat = await beats.next("a heartbeat")
    while not (isinstance(heartbeat, m.Heartbeat) and heartbeat.state is m.WorkerState.READY):
        heartbeat = await beats.next("a heartbeat of a ready worker")
    return heartbeat


async def test_it_beats_and_drains(nats: NatsBroker, run_dir: Path, tasks: Tasks) -> None:
    coordinator = await nats.client("coordinator")
    beats = Listener()
    tasks.start(coordinator.subscribe(SUBJECTS.heartbeat(), beats))
    process = await start("--run-dir", str(run_dir), "--worker", "reward-0")
    heartbeat = await of_a_ready_worker(beats)
    assert (heartbeat.worker, heartbeat.pid, heartbeat.policy_version) == ("reward-0", process.pid, 7)
    assert heartbeat.rss_bytes > 10_000_000
    process.send_signal(signal.SIGUSR1)
    process.terminate()
    code, text = await end_of(process)
    assert code == 0
    assert "drains after SIGTERM" in text
    assert "most recent call first" in text, "SIGUSR1 writes the stacks"


async def test_what_it_logs_bears_the_step_and_the_span_of_its_work(nats: NatsBroker, run_dir: Path) -> None:
    rollout = await nats.client("rollout")
    process = await start("--run-dir", str(run_dir), "--worker", "reward-0")
    token = context.attach(baggage.set_baggage(STEP, "7"))
    try:
        with TracerProvider().get_tracer("test").start_as_current_span("generate group") as span:
            await rollout.publish(next(example for example in MESSAGES if isinstance(example, m.TrajectoryGroup)))
    finally:
        context.detach(token)
    assert process.stderr is not None
    async with deadline(20, "the message to be taken"):
        text = await process.stderr.readuntil(b"takes TrajectoryGroup")
        text += await process.stderr.readline()
    process.terminate()
    assert (await end_of(process))[0] == 0
    (line,) = [record for record in read_lines("reward-0", text.splitlines()) if record.logger == "tiny"]
    assert (line.worker, line.level, line.step) == ("reward-0", "INFO", 7)
    assert line.trace_id == trace.format_trace_id(span.get_span_context().trace_id)
    assert line.span_id != trace.format_span_id(span.get_span_context().span_id), "the handler has a span of its own"


async def test_live_numbers_come_with_each_heartbeat(nats: NatsBroker, run_dir: Path, tasks: Tasks) -> None:
    coordinator, heard = await nats.client("coordinator"), Listener()
    for subject in (SUBJECTS.heartbeat(), SUBJECTS.metrics("reward")):
        tasks.start(coordinator.subscribe(subject, heard))
    process = await start("--run-dir", str(run_dir), "--worker", "reward-0")
    messages = [await heard.next("heartbeats and live numbers") for _ in range(4)]
    process.terminate()
    beats = [message for message in messages if isinstance(message, m.Heartbeat)]
    live = [message for message in messages if isinstance(message, m.Metrics)]
    assert [message.step for message in live] == [-1, -1]
    assert [message.values["resources/rss_bytes/reward-0"] for message in live] == [b.rss_bytes for b in beats]
    assert live[-1].values["workers/policy_version/reward-0"] == 7
    assert (await end_of(process))[0] == 0


async def test_that_it_has_started_is_told_at_once(nats: NatsBroker, run_dir: Path, tasks: Tasks) -> None:
    coordinator = await nats.client("coordinator")
    beats = Listener()
    tasks.start(coordinator.subscribe(SUBJECTS.heartbeat(), beats))
    process = await start("--run-dir", str(run_dir), "--worker", "slow")
    told = {}
    while m.WorkerState.READY not in told:
        heartbeat = await beats.next("a heartbeat of a ready worker")
        assert isinstance(heartbeat, m.Heartbeat)
        told[heartbeat.state] = time.monotonic()
    took_s = told[m.WorkerState.READY] - told[m.WorkerState.STARTING]
    assert START_S["slow"] / 2 < took_s < HEARTBEAT_EVERY_S - START_S["slow"]
    process.terminate()
    assert (await end_of(process))[0] == 0


async def test_a_second_signal_ends_it_at_once(nats: NatsBroker, run_dir: Path) -> None:
    process = await start("--run-dir", str(run_dir), "--worker", "stubborn")
    coordinator = await nats.client("coordinator")
    beats = Listener()
    async with asyncio.TaskGroup() as group:
        listening = group.create_task(coordinator.subscribe(SUBJECTS.heartbeat(), beats))
        await of_a_ready_worker(beats)
        process.terminate()
        assert process.stderr is not None
        async with deadline(10, "the first signal to be noticed"):
            await process.stderr.readuntil(b"drains after SIGTERM")
        process.terminate()
        assert (await end_of(process))[0] == 128 + signal.SIGTERM
        listening.cancel()


async def test_a_signal_ends_it_at_once_while_it_is_starting(nats: NatsBroker, run_dir: Path, tasks: Tasks) -> None:
    coordinator = await nats.client("coordinator")
    beats = Listener()
    tasks.start(coordinator.subscribe(SUBJECTS.heartbeat(), beats))
    process = await start("--run-dir", str(run_dir), "--worker", "endless")
    await beats.next("a heartbeat")
    process.terminate()
    assert (await end_of(process))[0] == 128 + signal.SIGTERM


async def test_an_error_goes_out_on_the_bus_with_its_traceback(nats: NatsBroker, run_dir: Path, tasks: Tasks) -> None:
    coordinator = await nats.client("coordinator")
    failures = Listener()
    tasks.start(coordinator.subscribe(SUBJECTS.error(), failures))
    await coordinator.last(m.Phase)  # the subscription is in place before the answer to this
    code, text = await end_of(await start("--run-dir", str(run_dir), "--worker", "crash"))
    assert code == 1
    (last,) = [record for record in read_lines("crash", text.encode().splitlines()) if record.level == "ERROR"]
    assert (last.worker, last.message) == ("crash", "crash ends by an error")
    assert last.exception.endswith("KeyError: 'a defect'")
    failed = await failures.next("ServiceFailed")
    assert isinstance(failed, m.ServiceFailed)
    assert (failed.worker, failed.error) == ("crash", "KeyError: 'a defect'")
    assert "tiny_service.py" in failed.traceback


async def test_a_setting_to_change_is_one_plain_line(run_dir: Path) -> None:
    code, text = await end_of(await start("--run-dir", str(run_dir), "--worker", "unusable"))
    assert code == 2
    assert "error: model.path='/nowhere' has no tokenizer" in text
    assert "Traceback" not in text


async def test_a_service_that_is_done_exits_0(run_dir: Path) -> None:
    assert (await end_of(await start("--run-dir", str(run_dir), "--worker", "done")))[0] == 0


async def test_no_broker_is_exit_3_with_the_address(nats: NatsBroker, run_dir: Path) -> None:
    await nats.server.stop()
    code, text = await end_of(await start("--run-dir", str(run_dir)))
    assert code == 3
    assert f"no nats-server at {nats.server.url}" in text
    assert "Traceback" not in text


async def test_no_run_folder_is_exit_2(tmp_path: Path) -> None:
    code, text = await end_of(await start("--run-dir", str(tmp_path)))
    assert code == 2
    assert f"{tmp_path}/config.json does not exist: start the run with `beamline run`" in text


async def test_help_imports_nothing_heavy() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-X", "importtime", str(TINY_SERVICE), "--help",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    stdout, imports = await process.communicate()
    assert process.returncode == 0
    assert b"--run-dir" in stdout
    assert not {b"nats", b"hydra", b"torch"} & {line.split(b"|")[-1].strip() for line in imports.splitlines()}


async def test_the_configuration_survives_its_file(tmp_path: Path) -> None:
    write_config(tmp_path, CONFIG)
    assert read_config(tmp_path) == CONFIG
