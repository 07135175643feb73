"""Makes the pictures of docs/dashboard.md: `python picture_dashboard.py DIR`, with the coordinator's Python."""

import argparse
import asyncio
import io
import tempfile
from pathlib import Path

from PIL import Image
from playwright.async_api import async_playwright

from dashboards import Chromium, dashboard, of
from shown_run import ShownRun

PICTURES = {
    "dashboard-light": ("light", 1200, 1560, "body"),
    "dashboard-dark": ("dark", 1200, 1560, "#title-time"),
    "dashboard-phone": ("light", 390, 1500, "body"),
}
"""Scheme, width and height in pixels, and what is scrolled to."""
NUM_COLOURS = 255


async def take(url: str, folder: Path) -> None:
    async with async_playwright() as playwright:
        chromium = await Chromium.launch(playwright)
        for name, (scheme, width, height, shown) in PICTURES.items():
            page = await chromium.open(url, color_scheme=scheme, viewport={"width": width, "height": height})
            await page.locator("#samples article").first.wait_for()
            await page.locator(shown).evaluate("element => element.scrollIntoView()")
            shot = Image.open(io.BytesIO(await page.screenshot())).convert("RGB")
            few = shot.quantize(NUM_COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
            few.save(folder / f"{name}.png", optimize=True)
        await chromium.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as runs, dashboard(*of(ShownRun(Path(runs) / "demo").whole())) as url:
        asyncio.run(take(url, folder))


if __name__ == "__main__":
    main()
