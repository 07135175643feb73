"""`beamline top`: a live run on the whole terminal, or as plain lines where there is none."""

import asyncio
import logging
import os
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from beamline.coordinator.launch.progress import Progress, step_line
from beamline.coordinator.launch.run_folder import in_use
from beamline.coordinator.launch.status import show_summary
from beamline.coordinator.observe.flow import stages
from beamline.coordinator.observe.follow import follow_run, until_set_up
from beamline.coordinator.observe.recall import recall
from beamline.coordinator.observe.top_screen import Screen, clock, end_lines, render
from beamline.coordinator.observe.view import RunView
from beamline.coordinator.summary import read_summary
from beamline.protocol.messages import Message

REDRAW_EVERY_S = 1.0
"""Ages grow without any message."""
MIN_REDRAW_S = 0.1
"""However fast messages come."""
_LEAVE_KEYS = b"qQ\x03"


async def top(run_dir: Path, console: Console) -> None:
    """Show a live run until it ends or the user leaves, then what it came to; an ended run only that.

    Raises:
        ConfigError: a file of the run is damaged.
        BusUnavailable: nobody answers at the run's bus.
    """
    view = RunView()
    await until_set_up(run_dir)
    recall(run_dir, view)
    if in_use(run_dir):
        is_left = await _follow(run_dir, view, console)
        if is_left:
            return
    show_end(run_dir, view, console)


async def _follow(run_dir: Path, view: RunView, console: Console) -> bool:
    """Whether the user has left before the end."""
    if console.is_terminal and not console.is_dumb_terminal and sys.stdin.isatty():
        return await Terminal(run_dir, view).show()
    await follow_in_lines(run_dir, view, console)
    return False


def show_end(run_dir: Path, view: RunView, console: Console) -> None:
    """What a run came to."""
    if (run_dir / "summary.json").is_file():
        show_summary(read_summary(run_dir / "summary.json"), console)
        return
    for line in end_lines(view, run_dir.name):
        console.print(line, highlight=False, markup=False)


async def follow_in_lines(run_dir: Path, view: RunView, console: Console) -> None:
    """Where the run is in a few lines, then a line for everything that is new."""
    started = run_start(run_dir)
    progress = Progress(view, now=lambda: time.time() - started)

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    left = view.left_s(time.time())
    about = f", about {clock(left)} left" if left is not None else ""
    say(f"run {run_dir.name}: step {view.step}/{view.num_steps}, {clock(time.time() - started)} elapsed{about}")
    if values := view.last_values():
        say(step_line(view.policy_version, view.num_steps, values))

    def changed(message: Message) -> None:
        for line in progress.lines(message):
            say(line)

    await follow_run(run_dir, view, changed)
    say("groups: " + ", ".join(f"{stage.num:.0f} {stage.name}" for stage in stages(view)))


def run_start(run_dir: Path) -> float:
    """When a run was started, in Unix seconds: its configuration is written once, before anything else."""
    return (run_dir / "config.json").stat().st_mtime


class Terminal:
    """The whole screen of the terminal that standard input and output are on, while a run is on.

    Args:
        run_dir: of a live run.
        view: is fed and shown.
    """

    def __init__(self, run_dir: Path, view: RunView) -> None:
        self._run_dir = run_dir
        self._view = view
        self._console = Console()
        self._started = run_start(run_dir)
        self._changed = asyncio.Event()
        self._left = asyncio.Event()
        self._notes = Notes()

    async def show(self) -> bool:
        """Follow the run; whether the user has left before its end. The terminal is as before on return."""
        following = asyncio.create_task(follow_run(self._run_dir, self._view, self._take))
        leaving = asyncio.create_task(self._left.wait())
        try:
            with self._notes.kept(), self._keys(), Live(console=self._console, screen=True, auto_refresh=False) as live:
                while not following.done() and not leaving.done():
                    live.update(self._drawn(), refresh=True)
                    await self._until_something_is_new(following, leaving)
            if following.done():
                following.result()
            return not following.done()
        finally:
            following.cancel()
            leaving.cancel()
            await asyncio.gather(following, leaving, return_exceptions=True)

    def _take(self, _: Message) -> None:
        self._notes.texts.clear()  # the bus is there
        self._changed.set()

    def _drawn(self) -> RenderableType:
        width, height = self._console.size
        screen = Screen(
            run=self._run_dir.name, width=width, height=height, started=self._started, notes=self._notes.texts
        )
        return render(self._view, screen, time.time())

    async def _until_something_is_new(self, *ends: asyncio.Task[object]) -> None:
        changed = asyncio.create_task(self._changed.wait())
        await asyncio.wait({changed, *ends}, timeout=REDRAW_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()
        await asyncio.wait(ends, timeout=MIN_REDRAW_S, return_when=asyncio.FIRST_COMPLETED)
        self._changed.clear()

    @contextmanager
    def _keys(self) -> Iterator[None]:
        """Take keys one by one and unseen; a signal leaves too, and a new size draws anew."""
        loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
        tty.setcbreak(descriptor)
        loop.add_reader(descriptor, self._take_key, descriptor)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._left.set)
        loop.add_signal_handler(signal.SIGWINCH, self._changed.set)
        try:
            yield
        finally:
            loop.remove_reader(descriptor)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGWINCH):
                loop.remove_signal_handler(number)
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

    def _take_key(self, descriptor: int) -> None:
        with suppress(OSError):
            keys = os.read(descriptor, 64)
            if not keys or any(key in _LEAVE_KEYS for key in keys):
                self._left.set()  # no keys at all: the terminal is gone


class Notes(logging.Handler):
    """Keeps what this program logs, which would tear the screen, as texts to be shown in it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: deque[str] = deque(maxlen=1)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    @contextmanager
    def kept(self) -> Iterator[None]:
        root = logging.getLogger()
        root.addHandler(self)
        try:
            yield
        finally:
            root.removeHandler(self)
