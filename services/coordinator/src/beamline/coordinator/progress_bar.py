"""Long work of a command: a bar on a terminal, plain lines elsewhere; both on standard error.

In a pipe nothing is said of what ends soon.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from rich.console import Console

SHOWN_AFTER_S = 2.0
"""In a pipe a part of the work is named when it has taken this long."""
TOLD_EVERY_S = 10.0
"""And how far it is, this often from then on."""
DRAWN_EVERY_S = 0.1
"""A bar, at most: drawing would take longer than a row."""


class Work(Protocol):
    """Work in parts, one after the other. Used as a context manager while it goes on."""

    def part(self, what: str, total: int | None = None) -> None:
        """Begin the next part. `total` is what `advance` adds up to; None where nobody knows."""
        ...

    def advance(self, num: int = 1) -> None:
        """So much more of the part is done."""
        ...


@contextmanager
def working(what: str = "") -> Iterator[Work]:
    """Show work until the block ends; `what` names its first part."""
    shown: BarWork | LineWork = BarWork() if sys.stderr.isatty() else LineWork()
    with shown:
        if what:
            shown.part(what)
        yield shown


def tracked[T](work: Work, what: str, items: Iterable[T], total: int | None) -> Iterator[T]:
    """A part of the work that goes through items."""
    work.part(what, total)
    for item in items:
        yield item
        work.advance()


class BarWork:
    """One bar for the part under way; nothing is left of it. By default on standard error."""

    def __init__(self, console: "Console | None" = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[told]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
        )
        self._bar = Progress(*columns, console=console or Console(stderr=True), transient=True)
        self._task: TaskID | None = None
        self._total: int | None = None
        self._done = 0
        self._drawn_s = 0.0

    def part(self, what: str, total: int | None = None) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._total, self._done = total, 0
        self._task = self._bar.add_task(what, total=total, told="")

    def advance(self, num: int = 1) -> None:
        self._done += num
        now_s = time.monotonic()
        if self._task is not None and now_s - self._drawn_s >= DRAWN_EVERY_S:
            self._drawn_s = now_s
            self._bar.update(self._task, completed=self._done, told=_count(self._done, self._total))

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


class LineWork:
    """A line for a part that takes long, and now and then one that says how far it is.

    Args:
        say: takes a line.
        shown_after_s: and `told_every_s`: as the constants.
    """

    def __init__(
        self,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
        shown_after_s: float = SHOWN_AFTER_S,
        told_every_s: float = TOLD_EVERY_S,
    ) -> None:
        self._say = say
        self._shown_after_s = shown_after_s
        self._told_every_s = told_every_s
        self._what = ""
        self._total: int | None = None
        self._done = 0
        self._due_s = 0.0
        """When something is to be said, by the monotonic clock."""
        self._over = threading.Event()
        self._telling = threading.Thread(target=self._tell, daemon=True)

    def part(self, what: str, total: int | None = None) -> None:
        self._what, self._total, self._done = what, total, 0
        self._due_s = time.monotonic() + self._shown_after_s

    def advance(self, num: int = 1) -> None:
        self._done += num

    def _tell(self) -> None:
        """A thread, since the work may be one long call."""
        while not self._over.wait(self._shown_after_s / 4):
            if self._what and time.monotonic() >= self._due_s:
                self._say(f"{self._what}: {_count(self._done, self._total)}" if self._done else f"{self._what} ...")
                self._due_s = time.monotonic() + self._told_every_s

    def __enter__(self) -> Self:
        self._telling.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._telling.join()


def _count(done: int, total: int | None) -> str:
    return f"{done:,}" if total is None else f"{done:,}/{total:,}"
