"""A live run: a real coordinator over a real broker, scripted services, and a page that is never loaded again."""

import asyncio
import fcntl
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest_asyncio
from playwright.async_api import expect

from beamline.runtime.credentials import Credentials, write_credentials
from dashboards import WAIT_MS, Chromium, Dashboard, of, rows_of, table
from live_ring import CONFIG, LiveRing
from live_run import live_run
from shown_run import NUM_STEPS as SHOWN_STEPS
from shown_run import ShownRun

NUM_STEPS = CONFIG.trainer.num_steps


@pytest_asyncio.fixture
async def ring(tmp_path: Path) -> AsyncIterator[LiveRing]:
    """A run whose first step is done, and whose second waits for its trainer."""
    async with live_run(tmp_path, CONFIG) as run:
        ring = await LiveRing.start(run)
        ring.trainer.allow(1)
        yield ring
        await ring.stop()


@pytest_asyncio.fixture
async def board(ring: LiveRing) -> AsyncIterator[Dashboard]:
    board = await Dashboard.start(*of(ring.run.run_dir))
    yield board
    await board.stop()


async def test_a_page_follows_a_run_to_its_end(chromium: Chromium, ring: LiveRing, board: Dashboard):
    page = await chromium.open(board.url)
    await page.evaluate("window.isTheSamePage = true")
    await page.get_by_text(f"Step 1 of {NUM_STEPS} done").wait_for()
    await page.locator("#phase").get_by_text("train").wait_for()
    assert await page.locator("#state").inner_text() == "running"
    await expect(page.locator("#connection")).to_have_text("live: this page updates by itself", timeout=WAIT_MS)
    for worker in ("rollout-0", "rollout-1"):
        cells = page.locator("#workers tbody tr").filter(has_text=worker).locator("th, td")
        await expect(cells.nth(2)).to_have_text("1", timeout=WAIT_MS)
    _, *workers = await table(page, "#workers")
    serving = {row[0]: (row[1], row[2]) for row in workers if row[0].startswith("rollout")}
    assert serving == {"rollout-0": ("ready", "1"), "rollout-1": ("ready", "1")}
    assert all(row[5].endswith("s ago") for row in workers)

    ring.trainer.allow(1)
    await page.get_by_text(f"Step 2 of {NUM_STEPS} done").wait_for()
    await page.locator("figure[data-chart='reward-mean'] figcaption").get_by_text("at step 2.").wait_for()
    summary = json.loads((await ring.finish()).read_text())
    await page.get_by_text("finished").wait_for()
    await expect(page.locator("#step")).to_have_text(f"Step {NUM_STEPS} of {NUM_STEPS} done", timeout=WAIT_MS)
    await expect(page.locator("#connection")).to_have_text("ended", timeout=WAIT_MS)
    assert await rows_of(page, "reward-mean") == [
        {"step": step["step"], "value": step["values"]["reward/mean"]} for step in summary["steps"]
    ]
    issued = (await page.locator("#sum").inner_text()).split()[0]
    assert int(issued) == summary["ledger"]["issued"]
    assert await page.evaluate("window.isTheSamePage"), "it was never loaded again"


async def test_a_lost_server_is_told(chromium: Chromium, board: Dashboard):
    page = await chromium.open(board.url)
    await board.stop()
    await page.get_by_text("connection lost, trying again").wait_for()
    chromium.said.clear()  # the browser reports each failed attempt


async def test_two_pages_of_one_run_show_the_same(chromium: Chromium, ring: LiveRing, board: Dashboard):
    first, second = await asyncio.gather(chromium.open(board.url), chromium.open(board.url))
    ring.trainer.allow(2)
    for page in (first, second):
        await page.get_by_text(f"Step 3 of {NUM_STEPS} done").wait_for()
    assert await rows_of(first, "reward-mean") == await rows_of(second, "reward-mean")
    await first.close()
    ring.trainer.allow(1)
    await second.get_by_text(f"Step {NUM_STEPS} of {NUM_STEPS} done").wait_for()


async def test_a_run_that_only_begins_and_cannot_be_heard_is_no_empty_page(chromium: Chromium, tmp_path: Path):
    run = ShownRun(tmp_path / "young")
    run.begin()
    write_credentials(run.run_dir, "cli", Credentials(url="nats://127.0.0.1:1"))
    (run.run_dir / "metrics.jsonl").write_text("no record\n")
    (run.run_dir / "launcher.lock").touch()
    with in_use_by_a_launcher(run.run_dir):
        board = await Dashboard.start(*of(run.run_dir))
        page = await chromium.open(board.url)
        assert await page.locator("#state").inner_text() == "running"
        await page.get_by_text("the run's bus is not heard").wait_for()
        assert {row["work"] for row in await rows_of(page, "gantt")} == {"evaluate"}
        run.step(1)
        await page.get_by_text(f"Step 1 of {SHOWN_STEPS} done").wait_for()
        await page.locator("figure[data-chart='gantt']").get_by_text("step 1").wait_for()
        await board.stop()


@contextmanager
def in_use_by_a_launcher(run_dir: Path) -> Iterator[None]:
    with (run_dir / "launcher.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
