"""Draw the page of a synthetic job of 16 ranks, of which one holds up the others, as it is in the documentation.

    scripts/bench/run dashboard_picture -o docs/dashboard.png

Needs playwright and Debian's chromium.  The picture must stay small: one of 60 kB or more is refused.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from asyncpar.dashboard.picture import Painter
from asyncpar.dashboard.server import DashboardServer
from asyncpar.testing.jobs import SyntheticJob, Trouble

RANKS = 16
SECONDS = 53
MOST_BYTES = 60_000


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("dashboard.png"))
    output = parser.parse_args(arguments).output
    content = asyncio.run(draw())
    if len(content) >= MOST_BYTES:
        raise SystemExit(f"expected a picture of less than {MOST_BYTES} bytes, got {len(content)}")
    output.write_bytes(content)
    print(f"{output}: {len(content) / 1000:.1f} kB")


async def draw() -> bytes:
    """Return what a browser shows of the live page, as PNG."""
    from playwright.async_api import async_playwright

    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        raise SystemExit("chromium is not installed")
    async with DashboardServer("127.0.0.1", 0) as server, async_playwright() as playwright:
        painter = Painter()
        for job in SyntheticJob(RANKS, trouble=Trouble.LATE).summaries(SECONDS):
            await server.show(painter.paint(job))
        browser = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": 1080, "height": 760}, timezone_id="UTC")
        await page.goto(server.url)
        await page.wait_for_selector("#sentence:not(:empty)")
        await page.wait_for_function("document.querySelector('#link').textContent === 'live'")
        content = await page.screenshot(animations="disabled")
        await browser.close()
    return content


if __name__ == "__main__":
    main()
