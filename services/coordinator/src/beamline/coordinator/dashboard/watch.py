"""Follows a run for everyone who has its page open: reads its folder as it grows, and hears its bus while it lives."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from beamline.coordinator.dashboard.board import EMPTY, Board, change, draw
from beamline.coordinator.dashboard.run_files import RunFiles
from beamline.coordinator.observe.follow import follow_run
from beamline.coordinator.observe.view import RunView
from beamline.protocol.errors import BeamlineError

LOOK_S = 1.0
"""Between two looks at the folder of a live run."""
LOOK_AT_ENDED_S = 3.0
DRAW_S = 1.0
"""At the least between two boards, however much is heard."""
RECONNECT_S = 5.0
KEEP_ALIVE_S = 15.0
"""After so long without a change an empty event says that the page is still served."""

log = logging.getLogger(__name__)


class Watch:
    """One run. It works while at least one page is open."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._num_pages = 0
        self._task: asyncio.Task[None] | None = None
        self._board = EMPTY
        self._drawn = asyncio.Condition()
        self._heard = asyncio.Event()
        self._view: RunView | None = None
        self._has_failed = False
        self._note = ""
        """Why the bus is not heard."""

    async def changes(self) -> AsyncGenerator[dict[str, Any]]:
        """The whole board, then each change of it; empty ones while nothing changes. Ends with its consumer.

        Raises RuntimeError when the run cannot be followed any more: our own mistake, which the log tells.
        """
        async with self._open():
            shown = EMPTY
            while True:
                board = await self._next(shown)
                yield {"now": time.time(), "first": shown is EMPTY, **change(shown, board)}
                shown = board

    async def _next(self, shown: Board) -> Board:
        """The board when it is another than this one, or after KEEP_ALIVE_S."""
        try:
            async with asyncio.timeout(KEEP_ALIVE_S), self._drawn:
                await self._drawn.wait_for(lambda: self._board is not shown or self._has_failed)
        except TimeoutError:
            return shown
        if self._has_failed:
            raise RuntimeError(f"{self._run_dir} is not followed any more")
        return self._board

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[None]:
        self._num_pages += 1
        if self._task is None:
            self._task, self._has_failed = asyncio.create_task(self._follow()), False
        try:
            yield
        finally:
            self._num_pages -= 1
            if self._num_pages == 0:
                self._task.cancel()
                self._task, self._board = None, EMPTY

    async def _follow(self) -> None:
        files, hearing = RunFiles(self._run_dir), None
        try:
            while True:
                news = files.poll()
                if files.is_live and hearing is None:
                    hearing = asyncio.create_task(self._hear())
                if hearing is not None and hearing.done():
                    hearing.result()
                    hearing = None
                await self._draw(files, news)
                await asyncio.sleep(DRAW_S)
                await self._wait(LOOK_S if files.is_live else LOOK_AT_ENDED_S)
        except Exception:
            log.exception("the dashboard of %s cannot go on", self._run_dir)
            self._has_failed = True
            async with self._drawn:
                self._drawn.notify_all()
        finally:
            if hearing is not None:
                hearing.cancel()

    async def _draw(self, files: RunFiles, news: set[str]) -> None:
        view = self._view if files.is_live else None
        board = draw(files, view or (RunView() if files.is_live else None), self._notes(files), news, self._board)
        if board.panels != self._board.panels or board.rows != self._board.rows:
            async with self._drawn:
                self._board = board
                self._drawn.notify_all()

    async def _wait(self, seconds: float) -> None:
        """Until something is heard, or it is time to look at the folder again."""
        try:
            async with asyncio.timeout(seconds):
                await self._heard.wait()
        except TimeoutError:
            return
        self._heard.clear()

    async def _hear(self) -> None:
        """Follow the bus until the run ends, again and again where it does not answer."""
        while True:
            self._view, self._note = RunView(), ""
            try:
                await follow_run(self._run_dir, self._view, lambda _: self._heard.set())
            except (BeamlineError, OSError) as error:
                self._note = f"the run's bus is not heard ({error}): workers and phase may be old"
            else:
                return
            await asyncio.sleep(RECONNECT_S)

    def _notes(self, files: RunFiles) -> list[str]:
        return [self._note] if self._note and files.is_live else []
