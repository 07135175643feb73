"""The page as people use it: with a keyboard, with a screen reader, at night, on a phone."""

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page

from dashboards import Chromium

PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 900}
LIGHT_CARD, DARK_CARD = "rgb(255, 255, 255)", "rgb(26, 32, 42)"


@pytest.mark.parametrize(
    ("scheme", "size"), [("light", DESK), ("dark", DESK), ("light", PHONE), ("dark", PHONE)],
    ids=["light", "dark", "light-phone", "dark-phone"],
)  # fmt: skip
async def test_axe_finds_nothing_serious(chromium: Chromium, url: str, scheme: str, size: dict[str, int]):
    page = await chromium.open(url, color_scheme=scheme, viewport=size)
    await open_all(page)
    await page.locator("#samples article").first.wait_for()
    found = await Axe().run(page)
    assert [f"{v['id']}: {v['nodes'][0]['html']}" for v in found.response["violations"] if v["impact"] in BAD] == []
    assert len(found.response["passes"]) > 20


BAD = ("serious", "critical")


async def test_the_list_of_runs_is_usable_too(chromium: Chromium, url: str):
    page = await chromium.open(url, viewport=PHONE)
    await page.get_by_role("link", name="Beamline runs").click()
    await page.get_by_role("heading", name="Runs").wait_for()
    found = await Axe().run(page)
    assert [v["id"] for v in found.response["violations"] if v["impact"] in BAD] == []
    await page.get_by_role("link", name="demo").click()
    await page.get_by_text("Step 20 of 20 done").wait_for()


async def test_a_phone_need_not_be_scrolled_sideways(chromium: Chromium, url: str):
    page = await chromium.open(url, viewport=PHONE)
    await open_all(page)
    assert await page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    wide = """all => all.filter((chart) => chart.getBoundingClientRect().right > innerWidth
      || chart.querySelector("svg").getBoundingClientRect().width > chart.clientWidth + 1)
      .map((chart) => chart.dataset.title)"""
    assert await page.locator(".chart").evaluate_all(wide) == []


async def test_it_is_used_by_keyboard(chromium: Chromium, url: str):
    page = await chromium.open(url)
    await page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="Skip to the content")
    assert await focused(page) == "Skip to the content" and await skip.bounding_box() is not None
    await page.keyboard.press("Enter")
    assert await page.evaluate("document.activeElement.id") == "main"
    await page.keyboard.press("Tab")
    assert await focused(page) == "Data of “Held-out accuracy”"
    outline = await page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
    assert float(outline.removesuffix("px")) >= 2, "the focus can be seen"
    await page.keyboard.press("Enter")
    await page.keyboard.press("Tab")
    assert await page.evaluate("document.activeElement.getAttribute('aria-label')") == "Data: Held-out accuracy"
    stops = await stops_until(page, "sampled")
    assert "Data of “The last steps, by worker”" in stops and "The ledger as a table" in stops
    await page.keyboard.type("7")
    await page.keyboard.press("Enter")
    await page.get_by_text("2 prompt groups of step 7", exact=True).wait_for()


async def test_the_scheme_is_the_systems_until_another_is_chosen(chromium: Chromium, url: str):
    page = await chromium.open(url, color_scheme="dark")
    card = "getComputedStyle(document.querySelector('figure')).backgroundColor"
    assert await page.evaluate(card) == DARK_CARD
    await page.get_by_label("Colours").select_option("light")
    assert await page.evaluate(card) == LIGHT_CARD
    await page.reload()
    await page.locator("figure").first.wait_for()
    assert await page.evaluate(card) == LIGHT_CARD
    assert await page.get_by_label("Colours").input_value() == "light"
    await page.get_by_label("Colours").select_option("")
    assert await page.evaluate(card) == DARK_CARD


async def test_charts_have_words_beside_them(chromium: Chromium, url: str):
    page = await chromium.open(url)
    figures = await page.locator("figure").all()
    assert len(figures) == 9
    for figure in figures:
        title = await figure.locator("h3").inner_text()
        assert len(await figure.locator("figcaption").inner_text()) > 20, title
        assert await figure.locator("[role='graphics-document']").get_attribute("aria-label") == title
        assert await figure.locator("table caption").text_content() == title


async def test_the_token_does_not_stay_in_the_address(chromium: Chromium, url: str):
    page = await chromium.open(url)
    assert page.url == url.partition("?")[0]
    assert await page.evaluate("document.cookie") == "", "no script can read it"


async def open_all(page: Page) -> None:
    """All that is folded away and may be opened."""
    for closed in await page.locator("details > summary:visible").all():
        await closed.click()


async def focused(page: Page) -> str:
    return await page.evaluate("document.activeElement.innerText.trim()")


async def stops_until(page: Page, element_id: str) -> list[str]:
    """Press Tab until the element has the focus; returns what had it before."""
    found: list[str] = []
    while await page.evaluate("document.activeElement.id") != element_id:
        found.append(await focused(page))
        assert len(found) < 60, found
        await page.keyboard.press("Tab")
    return found
