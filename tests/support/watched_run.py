"""A browser that has a run's dashboard open from its beginning to its end, beside the test that starts the run."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.async_api import Page, async_playwright

from beamline.coordinator.launch.run_folder import LOCK_FILE
from beamline.runtime.deadline import deadline
from dashboards import CHROMIUM, Chromium, Dashboard, figures, of, rows_of, table

BEGIN_S = 60.0
RUN_S = 600.0
LIVE_S = 60.0
"""Until the workers are heard, once a step is done."""
CHARTS = ("accuracy", "reward-mean", "tokens-response_mean", "policy-mismatch_abs_mean", "policy-entropy",
          "throughput-tokens_per_s", "phases", "gantt")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What a page shows of a run that is over."""

    state: str
    step: str
    figures: list[tuple[str, str, str]]
    charts: dict[str, list[dict[str, Any]]]
    ledger: list[list[str]]


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What the page showed."""

    live_state: str
    live_connection: str
    live_workers: list[list[str]]
    """Once a step was done."""
    steps: list[str]
    """Every text of the line that says how far the run is."""
    ended: Shown
    """The same page, never loaded again."""
    opened_after: Shown
    """One that was opened after the run's end."""
    complaints: list[str]


@contextmanager
def watched(run_dir: Path) -> Iterator[Future[Watched | None]]:
    """Watch the run that the block starts. The future has None where there is no browser."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(lambda: asyncio.run(_watch(run_dir)))


async def _watch(run_dir: Path) -> Watched | None:
    if CHROMIUM is None:
        return None
    async with deadline(BEGIN_S, f"the folder {run_dir}"):
        while not (run_dir / LOCK_FILE).is_file() or not (run_dir / "config.json").is_file():
            await asyncio.sleep(0.1)  # files of another process: nothing tells when they come
    board = await Dashboard.start(*of(run_dir))
    try:
        async with async_playwright() as playwright:
            chromium = await Chromium.launch(playwright)
            try:
                return await _look(chromium, board.url)
            finally:
                await chromium.close()
    finally:
        await board.stop()


async def _look(chromium: Chromium, url: str) -> Watched:
    page = await chromium.open(url)
    await page.evaluate(KEEP_STEPS)
    await page.wait_for_function(f"() => {HAS_STEP} || {HAS_ENDED}", timeout=RUN_S * 1000)
    await page.locator("#workers tbody tr").nth(3).wait_for(timeout=LIVE_S * 1000)
    live_workers = await table(page, "#workers")
    live_state, live_connection = [await page.locator(f"#{name}").inner_text() for name in ("state", "connection")]
    await page.wait_for_function(f"() => {HAS_ENDED}", timeout=RUN_S * 1000)
    return Watched(
        live_state=live_state,
        live_connection=live_connection,
        live_workers=live_workers,
        steps=await page.evaluate("window.steps"),
        ended=await _shown(page),
        opened_after=await _shown(await chromium.open(url)),
        complaints=chromium.said,
    )


async def _shown(page: Page) -> Shown:
    await page.get_by_text("The ledger as a table").click()
    return Shown(
        state=await page.locator("#state").inner_text(),
        step=await page.locator("#step").inner_text(),
        figures=await figures(page),
        charts={key: await rows_of(page, key) for key in CHARTS},
        ledger=(await table(page, "#ledger"))[1:],
    )


HAS_STEP = "window.steps.some((text) => text.startsWith('Step 1 '))"
HAS_ENDED = "document.getElementById('connection').innerText === 'ended'"
KEEP_STEPS = """() => {
  const line = document.getElementById("step");
  window.steps = [line.innerText];
  const watching = new MutationObserver(() => window.steps.push(line.innerText));
  watching.observe(line, { childList: true, characterData: true, subtree: true });
}"""
