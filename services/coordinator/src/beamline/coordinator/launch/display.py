"""The console: plain lines in a pipe or a log, progress bars under them on a terminal."""

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from beamline.coordinator.launch.progress import Progress
from beamline.coordinator.observe.flow import under_way
from beamline.coordinator.observe.view import RunView

if TYPE_CHECKING:
    from rich.console import Console


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
    """Lines above two bars: the run's steps, and what the phase under way is about. By default on standard output."""

    def __init__(self, console: "Console | None" = None) -> None:
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (
            TextColumn("{task.description:<10}"),
            BarColumn(),
            TextColumn("{task.fields[told]}", markup=False),
            TimeElapsedColumn(),
        )
        self._bar = Bar(*columns, console=console, transient=True)
        self._steps = self._bar.add_task("run", total=None, told="")
        self._phase = self._bar.add_task("start", total=None, told="")

    def line(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def position(self, progress: Progress) -> None:
        view, stage = progress.view, under_way(progress.view, progress.num_workers)
        told = f"{view.policy_version}/{view.num_steps} steps{_without(view)}"
        self._bar.update(self._steps, completed=view.policy_version, total=view.num_steps or None, told=told)
        if self._bar.tasks[self._phase].description != view.phase:
            self._bar.reset(self._phase, description=str(view.phase), total=None, told="")
        if stage is not None:
            told = f"{stage.num:.0f}/{stage.total:.0f} {stage.unit} {stage.name}"
            self._bar.update(self._phase, completed=stage.num, total=stage.total, told=told)

    def shown(self) -> AbstractContextManager[object]:
        return self._bar


def _without(view: RunView) -> str:
    return f", without {', '.join(sorted(view.left_out))}" if view.left_out else ""


def choose_display() -> Display:
    """Bars where somebody can see them move."""
    return BarDisplay() if sys.stdout.isatty() else PlainDisplay()
