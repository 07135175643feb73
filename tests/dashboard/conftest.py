"""A made-up finished run, its dashboard, and a browser that may complain of nothing."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import async_playwright

from dashboards import CHROMIUM, Chromium, dashboard, of
from shown_run import ShownRun


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole run; not to be changed."""
    return ShownRun(tmp_path_factory.mktemp("runs") / "demo").whole()


@pytest.fixture(scope="session")
def url(finished: Path) -> Iterator[str]:
    """Of the finished run's dashboard, token included."""
    with dashboard(*of(finished)) as url:
        yield url


@pytest_asyncio.fixture
async def chromium() -> AsyncIterator[Chromium]:
    """Headless; closed with the test, which fails if a page complained."""
    if CHROMIUM is None:
        pytest.skip("needs Debian's chromium on the PATH")
    async with async_playwright() as playwright:
        chromium = await Chromium.launch(playwright)
        yield chromium
        await chromium.close()
    assert chromium.said == []
