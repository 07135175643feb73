"""Runs as a user starts them: `bin/beamline run ...`, with the real engines, in a folder of the test's own."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beamline.coordinator.launch.ask import connect
from beamline.protocol.messages import Message, Metrics, Phase
from beamline.protocol.subjects import Subjects
from beamline.runtime.deadline import deadline
from beamline.runtime.shm_blobs import shm_root

if TYPE_CHECKING:
    from watched_run import Watched

ROOT = Path(__file__).resolve().parents[2]
BEAMLINE = str(ROOT / "bin" / "beamline")
RUN_DEADLINE_S = 600.0
DEMO_STEPS = 15


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    output: str
    """All that it wrote."""
    shown: str
    """What it wrote on stdout."""


@dataclass(frozen=True)
class Run:
    """A run's folder after its end."""

    path: Path
    code: int
    output: str
    heard: Sequence[Metrics] = ()
    """Every message of its metrics, where somebody listened."""
    watched: "Watched | None" = None
    """What its dashboard showed, where it was open."""

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.path / "summary.json").read_text())

    @property
    def steps(self) -> dict[int, dict[str, float]]:
        """Values by step, of those that trained."""
        return {s["step"]: s["values"] for s in self.summary["steps"] if "reward/mean" in s["values"]}

    def evaluation(self, name: str, step: int) -> dict[str, float]:
        found = [e["values"] for e in self.summary["evaluations"] if (e["name"], e["step"]) == (name, step)]
        assert found, f"no evaluation {name} at step {step}"
        return found[0]


def beamline(*arguments: str, cwd: Path = ROOT, deadline_s: float = 60.0) -> Ended:
    """Run one command to its end."""
    done = subprocess.run(
        [BEAMLINE, *arguments], cwd=cwd, capture_output=True, text=True, timeout=deadline_s, check=False
    )
    return Ended(done.returncode, done.stdout + done.stderr, done.stdout)


def run_to_end(recipe: str, folder: Path, *overrides: str, name: str = "run") -> Run:
    """Start a run and wait for its end; the test's folder is where it lives."""
    ended = beamline("run", recipe, f"run.dir={folder}", f"run.name={name}", *overrides, deadline_s=RUN_DEADLINE_S)
    return Run(folder / name, ended.code, ended.output)


class LiveRun:
    """A run that is watched, and hurt, while it goes on."""

    def __init__(self, recipe: str, folder: Path, *overrides: str, name: str = "run") -> None:
        self.path = folder / name
        arguments = ("run", recipe, f"run.dir={folder}", f"run.name={name}", *overrides)
        self._log = (folder / "launcher.txt").open("w+b")
        self._process = subprocess.Popen(
            [BEAMLINE, *arguments], cwd=ROOT, stdout=self._log, stderr=self._log, start_new_session=True
        )

    def output(self) -> str:
        self._log.seek(0)
        return self._log.read().decode()

    async def started(self) -> None:
        """The broker is up: the run can be watched."""
        credentials = self.path / "credentials" / "cli.json"
        async with deadline(RUN_DEADLINE_S, f"the run's broker: {self.output()}"):
            while not credentials.is_file():
                assert self._process.poll() is None, self.output()
                await asyncio.sleep(0.1)  # a file of another process: nothing tells when it comes

    async def said(self, text: str) -> None:
        """The launcher has written it."""
        async with deadline(RUN_DEADLINE_S, f"{text!r} from the launcher: {self.output()}"):
            while text not in self.output():
                assert self._process.poll() is None, self.output()
                await asyncio.sleep(0.1)  # a file of another process, as above

    async def end(self) -> Run:
        async with deadline(RUN_DEADLINE_S, "the run to end"):
            code = await asyncio.to_thread(self._process.wait)
        return Run(self.path, code, self.output())

    async def until(self, condition: Callable[[Message], bool], what: str) -> Message:
        """The first heartbeat, metric or phase on the bus that the condition holds for; the run must not end before."""
        bus = await connect(self.path)
        found: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

        async def look(message: Message) -> None:
            if not found.done() and condition(message):
                found.set_result(message)

        subjects = (bus.subjects.heartbeat(), bus.subjects.metrics())
        watching = [asyncio.create_task(bus.subscribe(subject, look)) for subject in subjects]
        watching.append(asyncio.create_task(bus.follow(Phase, look)))
        ended = asyncio.create_task(self._ended())
        watching.append(ended)
        try:
            async with deadline(RUN_DEADLINE_S, what):
                await asyncio.wait({found, ended}, return_when=asyncio.FIRST_COMPLETED)
            assert found.done(), f"the run ended before {what}: {self.output()}"
            return found.result()
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            await bus.close()

    async def _ended(self) -> None:
        while self._process.poll() is None:
            await asyncio.sleep(0.2)  # a waiting thread could not be cancelled

    def interrupt(self) -> None:
        """One Ctrl-C: the run ends after the step under way."""
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL to the launcher and whatever shares its process group: its guard does not, and ends the rest."""
        os.killpg(self._process.pid, signal.SIGKILL)

    def kill_launcher(self) -> None:
        """What is left of a failed test."""
        if self._process.poll() is None:
            self.kill()
        self._process.wait()
        self._log.close()


@contextmanager
def ending(live: LiveRun) -> Iterator[LiveRun]:
    """Nothing of it is left running."""
    try:
        yield live
    finally:
        live.kill_launcher()


def of_step(step: int) -> Callable[[Message], bool]:
    """The coordinator's last word about a step."""
    return lambda m: isinstance(m, Metrics) and m.service == "coordinator" and m.step == step


def processes_of(folder: Path) -> list[str]:
    """Command lines of live processes that belong to a run in the folder."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(folder) in command:
            found.append(command)
    return found


def shared_memory_of(run_dir: Path) -> list[Path]:
    """What a run has left in shared memory."""
    root = shm_root(Subjects("beamline", run_dir.name), run_dir.resolve())
    return [root] if root.exists() else []
