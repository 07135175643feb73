"""A run of the demo that is looked at by 200 subscribers and an open dashboard, every other block of steps.

`bin/python coordinator -m benchmarks.observers --folder DIR --out FILE` writes `Looked` as JSON. A subscriber is a
connection to the run's broker as user `cli` that listens to all metrics and throws them away; the dashboard is
`beamline dashboard`, whose page's stream of events is kept open and read. All of it runs on the run's own machine.
"""

import argparse
import asyncio
import json
import os
import time
from asyncio.subprocess import PIPE, Process
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import msgspec

from beamline.coordinator.launch.ask import connect
from beamline.protocol.messages import Message, Metrics
from beamline.runtime.credentials import Credentials, read_credentials
from beamline.runtime.deadline import deadline
from beamline.runtime.nats_bus import NatsBus
from beamline.runtime.process_state import process_tree

NUM_SUBSCRIBERS = 200
BLOCK = 4
"""Steps between two changes; the step in which observers come or go is left out."""
START_DEADLINE_S = 120.0
RUN_DEADLINE_S = 900.0


class Looked(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of the steps that count, in order, and which of them were looked at."""

    seconds: list[float]
    is_looked_at: list[bool]
    cpu_shares: list[float]
    """Processor time of subscribers, dashboard and broker in each of these steps, as a share of the step."""
    num_received: int
    """Metrics that the subscribers received together."""
    num_events: int
    """That the dashboard's page received."""


class Subscriber(asyncio.Protocol):
    """Speaks as much of NATS's protocol as it takes to listen."""

    def __init__(self, credentials: Credentials, subject: str) -> None:
        login = {"user": credentials.user, "pass": credentials.password, "verbose": False, "headers": True}
        self._hello = f"CONNECT {json.dumps(login)}\r\nSUB {subject} 1\r\nPING\r\n".encode()
        self.num_received = 0
        self.ready = asyncio.Event()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self._hello)

    def data_received(self, data: bytes) -> None:
        if b"PONG\r\n" in data:
            self.ready.set()
        if b"PING\r\n" in data:
            assert self.transport is not None
            self.transport.write(b"PONG\r\n")
        self.num_received += data.count(b"MSG beamline.")


class Observers:
    """Come and go together."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._dashboard: Process | None = None
        self.num_received = self.num_events = 0

    def cpu_s(self) -> float:
        """Processor time that the broker and whoever looks have used so far; less when a dashboard has gone."""
        broker = json.loads((self._run_dir / "processes.json").read_bytes())["nats-server"]
        dashboard = process_tree(self._dashboard.pid) if self._dashboard else []
        return time.process_time() + sum(map(_cpu_s, [broker, *dashboard]))

    async def come(self, stack: AsyncExitStack) -> None:
        """All are there on return; they go with the stack."""
        bus = await connect(self._run_dir)
        subject = bus.subjects.metrics()
        await bus.close()
        credentials = read_credentials(self._run_dir, "cli")
        address = urlsplit(credentials.url)
        loop = asyncio.get_running_loop()
        for _ in range(NUM_SUBSCRIBERS):
            transport, subscriber = await loop.create_connection(
                lambda: Subscriber(credentials, subject), address.hostname, address.port
            )
            stack.callback(self._leave, transport, subscriber)
            await subscriber.ready.wait()
        await self._open_dashboard(stack)

    def _leave(self, transport: asyncio.Transport, subscriber: Subscriber) -> None:
        transport.close()
        self.num_received += subscriber.num_received

    async def _open_dashboard(self, stack: AsyncExitStack) -> None:
        process = await asyncio.create_subprocess_exec("bin/beamline", "dashboard", str(self._run_dir), stdout=PIPE)
        self._dashboard = process
        stack.push_async_callback(self._close_dashboard, process)
        assert process.stdout is not None
        url = urlsplit((await process.stdout.readline()).decode().split()[-1])
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        stack.callback(writer.close)
        token = parse_qs(url.query)["token"][0]
        writer.write(f"GET {url.path}/events?token={token} HTTP/1.1\r\nHost: {url.netloc}\r\n\r\n".encode())
        first = await reader.readline()
        assert b" 200 " in first, first
        reading = asyncio.create_task(self._read(reader))
        stack.callback(reading.cancel)

    async def _close_dashboard(self, process: Process) -> None:
        self._dashboard = None
        await _end(process)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while part := await reader.read(1 << 20):
            self.num_events += part.count(b"data:")


async def look(folder: Path, name: str, num_steps: int) -> Looked:
    """A run, in which the observers come and go. Raises RuntimeError if it ends too soon."""
    run_dir = folder / name
    command = ("run", "tiny-beam", f"run.dir={folder}", f"run.name={name}", f"trainer.num_steps={num_steps}")
    options = ("trainer.eval_interval=0", "--overwrite")
    run = await asyncio.create_subprocess_exec("bin/beamline", *command, *options, stdout=PIPE)
    observers = Observers(run_dir)
    async with AsyncExitStack() as stack, deadline(RUN_DEADLINE_S, "the run to end"):
        stack.push_async_callback(_end, run)
        await _started(run)
        bus = await connect(run_dir)
        stack.push_async_callback(bus.close)
        steps = asyncio.Queue[float | None]()
        for beside in (_watch(bus, steps), _drain(run, steps)):
            stack.callback(asyncio.create_task(beside).cancel)
        looking = await stack.enter_async_context(AsyncExitStack())
        seconds: list[float] = []
        cpu_s: list[float] = []
        while len(seconds) < num_steps:
            if (step_s := await steps.get()) is None:
                raise RuntimeError(f"the run ended after {len(seconds)} steps; its logs are in {run_dir / 'logs'}")
            seconds.append(step_s)
            cpu_s.append(observers.cpu_s())
            if len(seconds) % BLOCK == 0 and is_looked_at(len(seconds)):
                await observers.come(looking)
            elif len(seconds) % BLOCK == 0:
                await looking.aclose()
        await looking.aclose()
    kept = [number for number in range(num_steps) if number % BLOCK]
    return Looked(
        seconds=[seconds[number] for number in kept],
        is_looked_at=[is_looked_at(number) for number in kept],
        cpu_shares=[(cpu_s[number] - cpu_s[number - 1]) / seconds[number] for number in kept],
        num_received=observers.num_received,
        num_events=observers.num_events,
    )


def is_looked_at(number: int) -> bool:
    """Whether observers are there in a step, counted from 0; they come and go in the first of a block."""
    return number // BLOCK % 2 == 1


async def _started(run: Process) -> None:
    assert run.stdout is not None
    said: list[bytes] = []
    async with deadline(START_DEADLINE_S, "the run's broker"):
        while b"nats-server is ready" not in b"".join(said):
            if not (line := await run.stdout.readline()):
                raise RuntimeError(b"".join(said).decode(errors="replace"))
            said.append(line)


async def _watch(bus: NatsBus, steps: asyncio.Queue[float | None]) -> None:
    async def take(message: Message) -> None:
        if isinstance(message, Metrics) and "timing/step" in message.values:
            steps.put_nowait(message.values["timing/step"])

    await bus.subscribe(bus.subjects.metrics("coordinator"), take)


async def _drain(run: Process, steps: asyncio.Queue[float | None]) -> None:
    """Until the run's end."""
    assert run.stdout is not None
    while await run.stdout.read(1 << 16):
        pass
    await run.wait()
    steps.put_nowait(None)


def _cpu_s(pid: int) -> float:
    """User and system time of a process; 0 when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.terminate()
    await process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--name", default="observed")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    looked = asyncio.run(look(arguments.folder, arguments.name, arguments.steps))
    arguments.out.write_bytes(msgspec.json.encode(looked))


if __name__ == "__main__":
    main()
