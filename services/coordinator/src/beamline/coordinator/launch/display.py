"""The console: plain lines in a pipe or a log, a progress bar under them on a terminal."""

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from beamline.coordinator.launch.progress import Progress


class Display(Protocol):
    """Used as a context manager while the run is on."""

    def line(self, text: str) -> None:
        """Show a line for good."""
        ...

    def position(self, progress: Progress) -> None:
        """Show where the run is."""
        ...

    def shown(self) -> AbstractContextManager[object]:
        """Takes and gives back the terminal."""
        ...


class PlainDisplay:
    """Lines only."""

    def line(self, text: str) -> None:
        print(text, flush=True)

    def position(self, progress: Progress) -> None:
        pass

    def shown(self) -> AbstractContextManager[object]:
        return nullcontext()


class BarDisplay:
    """Lines above a progress bar."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Bar(*columns, transient=True)
        self._task = self._bar.add_task("start", total=None)

    def line(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def position(self, progress: Progress) -> None:
        total = progress.num_steps or None
        self._bar.update(self._task, description=str(progress.phase), completed=progress.step, total=total)

    def shown(self) -> AbstractContextManager[object]:
        return self._bar


def choose_display() -> Display:
    """A bar where somebody can see it move."""
    return BarDisplay() if sys.stdout.isatty() else PlainDisplay()
