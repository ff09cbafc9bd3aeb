"""The site in a real browser: three widths, light and dark."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, expect

from tests.site.pages import SITE, pages

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]
WIDTHS = (390, 820, 1440)
TOO_WIDE = """
() => [...document.querySelectorAll("body *")].filter(
    each => each.getBoundingClientRect().right > innerWidth + 1 && getComputedStyle(each).position !== "fixed"
).slice(0, 5).map(each => each.outerHTML.slice(0, 120))
"""


def watch(page: Page, address: str, wrong: list[str]) -> None:
    """Note errors in the console, and requests to any other place, in ``wrong``."""
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("request", lambda one: None if one.url.startswith((address, "data:")) else wrong.append(one.url))
    page.on("response", lambda one: wrong.append(f"{one.status} {one.url}") if one.status >= 400 else None)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_no_page_scrolls_sideways_complains_or_asks_elsewhere(
    address: str, browser: Browser, scheme: str
) -> None:
    context = await browser.new_context(color_scheme=scheme)  # type: ignore[arg-type]
    page, wrong = await context.new_page(), list[str]()
    watch(page, address, wrong)
    for path in pages():
        name = path.relative_to(SITE).as_posix()
        if scheme == "dark" and name.count("/") > 1:
            continue  # parts of the reference, which are all made alike, as wide in any colours
        await page.goto(f"{address}/{name}")
        for width in WIDTHS:
            await page.set_viewport_size({"width": width, "height": 900})
            if await page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                wrong.append(f"{name} at {width}: {await page.evaluate(TOO_WIDE)}")
    await context.close()
    assert wrong == []


async def test_search_finds_names_and_words(address: str, browser: Browser) -> None:
    page, wrong = await browser.new_page(), list[str]()
    watch(page, address, wrong)
    for query, found in (
        ("GradientSynchronizer", "asyncpar.gradsync.GradientSynchronizer"),
        ("DiLoCo", "Local SGD and DiLoCo"),
    ):
        await page.goto(f"{address}/search.html?q={query}")
        await expect(page.locator("#search-results")).to_contain_text(found, timeout=30_000)
    await page.close()
    assert wrong == []


async def test_the_theme_can_be_changed(address: str, browser: Browser, tmp_path: Path) -> None:
    context = await browser.new_context(color_scheme="light")
    page = await context.new_page()
    await page.goto(f"{address}/index.html")
    colour = "getComputedStyle(document.body).backgroundColor"
    before = await page.evaluate(colour)
    await page.emulate_media(color_scheme="dark")
    assert await page.evaluate(colour) != before
    await context.close()
