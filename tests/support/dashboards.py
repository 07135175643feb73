"""The dashboard as a user starts it, and Debian's Chromium to look at it."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.async_api import Browser, Page, Playwright

from beamline.runtime.deadline import deadline

CHROMIUM = shutil.which("chromium")
ARGUMENTS = ["--no-sandbox"] if os.geteuid() == 0 else []
WAIT_MS = 15_000
"""For anything that a page is to show."""
END_S = 10.0
"""Until the server has ended after SIGINT."""
START_S = 30.0


@contextmanager
def dashboard(*arguments: str) -> Iterator[str]:
    """Serve; gives the printed URL. It must end by itself when it is interrupted."""
    server = subprocess.Popen(_command(arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line, server.communicate()[1]
        yield line.split(": ", 1)[1].strip()
        server.send_signal(signal.SIGINT)
        rest, errors = server.communicate(timeout=END_S)
        assert (server.returncode, rest, errors) == (0, "", "")
    finally:
        server.kill()
        server.communicate()


class Dashboard:
    """A dashboard's server beside a test that must not stand still. Made by `start`."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.url = url
        self._process = process

    @classmethod
    async def start(cls, *arguments: str) -> "Dashboard":
        process = await asyncio.create_subprocess_exec(*_command(arguments), stdout=subprocess.PIPE)
        assert process.stdout is not None
        async with deadline(START_S, "the dashboard's URL"):
            line = (await process.stdout.readline()).decode()
        return cls(process, line.split(": ", 1)[1].strip())

    async def stop(self) -> None:
        """Interrupt it, if it still serves; it must end well."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGINT)
        async with deadline(END_S, "the dashboard to end"):
            assert await self._process.wait() == 0


def of(run_dir: Path) -> tuple[str, ...]:
    """Arguments that show a run's folder."""
    return (run_dir.name, "--runs", str(run_dir.parent))


class Chromium:
    """Opens pages, each in a context of its own, and writes down what they complain of."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self.said: list[str] = []
        """Errors and warnings on consoles, exceptions, requests to elsewhere."""

    @classmethod
    async def launch(cls, playwright: Playwright) -> "Chromium":
        return cls(await playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS))

    async def open(self, url: str, **options: Any) -> Page:
        """A page with all its charts drawn; the options are its context's."""
        page = await (await self._browser.new_context(**options)).new_page()
        page.set_default_timeout(WAIT_MS)
        self._listen(page)
        await page.goto(url)
        await page.wait_for_function(ALL_DRAWN)
        return page

    async def close(self) -> None:
        await self._browser.close()

    def _listen(self, page: Page) -> None:
        page.on("console", lambda message: self._say(message.text, message.type in ("error", "warning")))
        page.on("pageerror", lambda error: self._say(str(error), True))
        page.on("request", lambda request: self._say(request.url, urlsplit(request.url).hostname != "127.0.0.1"))

    def _say(self, text: str, is_bad: bool) -> None:
        if is_bad and not text.startswith("data:"):
            self.said.append(text)


async def rows_of(page: Page, chart: str) -> list[dict[str, Any]]:
    """The data of a chart as its table shows it; numbers as numbers."""
    figure = f"figure[data-chart='{chart}']"
    await page.locator(f"{figure} details > summary").click()
    await page.locator(f"{figure} thead tr").wait_for(state="attached")  # the page fills it after the click's event
    header, *rows = await table(page, f"{figure} table")
    return [{name: _number(cell) for name, cell in zip(header, row, strict=True)} for row in rows]


async def table(page: Page, selector: str) -> list[list[str]]:
    """Texts of a table's cells by row, its header first."""
    cells = "table => [...table.rows].map((row) => [...row.cells].map((cell) => cell.innerText.trim()))"
    return await page.locator(selector).evaluate(cells)


async def figures(page: Page) -> list[tuple[str, str, str]]:
    """Label, text and note of each figure at the top."""
    tiles = "all => all.map((div) => [...div.children].map((child) => child.innerText))"
    found = await page.locator("#figures > div").evaluate_all(tiles)
    return [(label, text, *(note or [""])) for label, text, *note in found]


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "beamline.coordinator.cli", "dashboard", *arguments]


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


ALL_DRAWN = """() => {
  const charts = [...document.querySelectorAll(".chart")];
  return document.getElementById("state").textContent && charts.every((chart) => chart.querySelector("svg"));
}"""
