"""The page in a real browser."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from asyncpar.dashboard.page_file import report_page
from asyncpar.dashboard.picture import Painter
from asyncpar.dashboard.server import DashboardServer
from asyncpar.observe.pipeline_runs import draw_run
from asyncpar.testing.jobs import SyntheticJob, Trouble, record_pipeline
from tests.dashboard.conftest import show
from tests.soak import first

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]
PATIENCE = 30_000
"""Milliseconds that anything may take."""

expect.set_options(timeout=PATIENCE)
PAGES = ("job", "ranks", "links", "operations", "gradients", "pipeline", "actors", "memory", "logs", "flight")


TOO_WIDE = """
async names => {
    const tooWide = [];
    for (const name of names) {
        document.getElementById(`tab-${name}`).click();
        await new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)));
        if (document.querySelector(`#tab-${name}[aria-selected=true]`) === null)
            throw new Error(`${name} is not open`);
        if (document.documentElement.scrollWidth > innerWidth)
            tooWide.push(name);
    }
    return tooWide;
}
"""
"""Opens one view after another; returns those that are wider than the window."""


@pytest_asyncio.fixture(loop_scope="module")
async def server() -> AsyncIterator[DashboardServer]:
    """A dashboard that shows a job of four ranks."""
    async with DashboardServer("127.0.0.1", 0, names=["hub.example.org"]) as serving:
        await show(serving, 4)
        yield serving


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tab(browser: Browser) -> AsyncIterator[Page]:
    """A page for all tests, one after another: a fresh one takes longer than most of them."""
    made = await browser.new_page()
    made.set_default_timeout(PATIENCE)
    yield made
    await made.context.close()


@pytest_asyncio.fixture(loop_scope="module")
async def page(tab: Page) -> AsyncIterator[Page]:
    """A page that shows and keeps nothing."""
    yield tab
    await tab.unroute_all()
    if tab.url.startswith("http"):
        await tab.evaluate("sessionStorage.clear(); localStorage.clear()")
    await tab.goto("about:blank")
    await tab.emulate_media(color_scheme="null")
    await tab.set_viewport_size({"width": 1280, "height": 720})


@contextmanager
def watched(page: Page, *, origin: str) -> Iterator[list[str]]:
    """Collect errors of scripts and requests to any other place; fail if there are some."""
    wrong: list[str] = []
    listeners: dict[str, Callable[[Any], None]] = {
        "pageerror": lambda error: wrong.append(str(error)),
        "console": lambda message: wrong.append(message.text) if "ecurity" in message.text else None,
        "request": lambda asked: None if asked.url.startswith((origin, "data:")) else wrong.append(asked.url),
    }
    for name, listener in listeners.items():
        page.on(name, listener)  # type: ignore[call-overload]  # one of its names, each with its type
    try:
        yield wrong
    finally:
        for name, listener in listeners.items():
            page.remove_listener(name, listener)
    assert not wrong


async def test_the_page_opens_streams_and_asks_nobody_else(server: DashboardServer, page: Page) -> None:
    with watched(page, origin=f"http://{server.address}/"):
        await page.goto(server.url)
        await expect(page.locator("#sentence")).to_contain_text("wait for rank 1 (node-00), which")
        for name in PAGES:
            await page.click(f"#tab-{name}")
            await expect(page.locator(f"#tab-{name}")).to_have_attribute("aria-selected", "true")

        await show(server, 4, seconds=3, trouble=Trouble.NOTHING)
        await expect(page.locator("#sentence")).to_have_text("All 4 ranks run; nothing holds them up.")

        assert server.token not in page.url
        await page.reload()  # the token is kept for this tab
        await expect(page.locator("#link")).to_have_text("live")


@pytest.mark.parametrize(("size", "scheme"), first(1, [(64, "dark"), (2, "light")]))
async def test_no_width_needs_sideways_scrolling(page: Page, size: int, scheme: str) -> None:
    async with DashboardServer("127.0.0.1", 0) as server:
        await show(server, size, seconds=6)
        await page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        with watched(page, origin=f"http://{server.address}/"):
            await page.goto(server.url)
            for width in (390, 820, 1440):
                await page.set_viewport_size({"width": width, "height": 900})
                assert await page.evaluate(TOO_WIDE, PAGES) == [], width


async def test_without_the_token_the_page_asks_for_it(server: DashboardServer, page: Page) -> None:
    await page.goto(f"http://{server.address}/#token=wrong")

    await expect(page.locator("#notice")).to_contain_text("needs the job's token")
    assert await page.locator("#sentence").text_content() == ""

    await page.fill("#notice input", server.token)
    await page.keyboard.press("Enter")
    await expect(page.locator("#link")).to_have_text("live")
    await expect(page.locator("#notice")).to_be_hidden()


async def test_a_page_of_another_origin_gets_nothing(server: DashboardServer, page: Page) -> None:
    async with DashboardServer("127.0.0.1", 0) as other:
        await page.goto(f"http://{other.address}/")

        outcome = await page.evaluate(
            "([url, token]) => fetch(url, {headers: {Authorization: `Bearer ${token}`}})"
            ".then(answer => answer.status, error => String(error))",
            [f"http://{server.address}/events", server.token],
        )

    assert outcome.startswith("TypeError")


async def test_a_lost_launcher_is_reported_and_found_again(page: Page) -> None:
    async with DashboardServer("127.0.0.1", 0) as server:
        await show(server, 4)
        port, token = int(server.address.rpartition(":")[2]), server.token
        await page.goto(server.url)
        await expect(page.locator("#link")).to_have_text("live")

    await expect(page.locator("#notice")).to_contain_text("does not answer")
    await expect(page.locator("canvas").first).to_be_visible()  # the last picture stays

    again = DashboardServer("127.0.0.1", port, token=token)
    async with again:
        await show(again, 4, seconds=2)
        await expect(page.locator("#link")).to_have_text("live")
        await expect(page.locator("#notice")).to_be_hidden()
        (job,) = SyntheticJob(4).summaries(1)
        await again.show(Painter().paint(job, ended="The job has ended with exit code 3.") | {"failed": True})
        await expect(page.locator("#sentence")).to_have_text("The job has ended with exit code 3.")
    await expect(page.locator("#link")).to_have_text("ended")


async def test_a_proxy_under_a_path_works(server: DashboardServer, page: Page) -> None:
    """As JupyterHub's, which serves the page under /user/me/proxy/8787/ with or without the slash."""
    prefix = "http://hub.example.org/user/me/proxy/8787"

    async def forward(route) -> None:  # type: ignore[no-untyped-def]
        rest = route.request.url.removeprefix(prefix).lstrip("/")
        assert route.request.url.startswith(prefix)
        answer = await page.context.request.fetch(
            f"http://{server.address}/report" if rest == "events" else f"http://{server.address}/{rest}",
            headers={**route.request.headers, "host": "hub.example.org"},
        )
        if rest == "events":
            assert server.latest is not None
            body = b"data: " + msgspec.json.encode(server.latest | {"ended": "ended"}) + b"\n\n"
            await route.fulfill(status=answer.status, body=body, content_type="text/event-stream")
        else:
            await route.fulfill(response=answer)

    await page.route("http://hub.example.org/**", forward)
    for path in ("/", ""):
        await page.goto(f"{prefix}{path}#token={server.token}")
        await expect(page.locator("#link")).to_have_text("ended")
        await page.goto("about:blank")


async def test_the_keyboard_reaches_everything(server: DashboardServer, page: Page) -> None:
    await page.goto(server.url)
    await expect(page.locator("#link")).to_have_text("live")

    await page.keyboard.press("2")
    await expect(page.locator("#tab-ranks")).to_have_attribute("aria-selected", "true")
    await page.keyboard.press("/")
    await page.keyboard.type("waits")
    assert await page.locator("tbody tr").count() == 3
    await page.focus("#tab-ranks")
    await page.keyboard.press("ArrowLeft")
    await expect(page.locator("#tab-job")).to_be_focused()
    await page.focus("canvas")
    await page.keyboard.press("ArrowLeft")
    await expect(page.locator("#tip")).to_contain_text("rank 0: waits")


async def test_text_of_the_job_is_never_markup(page: Page) -> None:
    async with DashboardServer("127.0.0.1", 0) as server:
        await show(server, 2, seconds=2)
        assert server.latest is not None
        bad = "<img src=x onerror=alert(1)>"
        server.latest |= {"job": bad, "command": bad, "sentence": bad}
        server.latest["ranks"][0] |= {"host": bad, "site": bad}
        server.tail.add(bad.encode(), rank=0)
        await server.dashboard.show(server.latest)
        with watched(page, origin=f"http://{server.address}/"):
            await page.goto(server.url)
            for name in PAGES:
                await page.click(f"#tab-{name}")
                assert await page.locator("img").count() == 0
            await page.click("#tab-logs")
            await expect(page.locator(".log")).to_contain_text(bad)


async def test_the_report_shows_the_same_without_a_server(page: Page, tmp_path: Path) -> None:
    async with DashboardServer("127.0.0.1", 0) as server:
        await show(server, 4)
        server.tail.add(b"hello from rank 2", rank=2)
        file = tmp_path / "run.html"
        file.write_text(report_page({"picture": server.latest, "lines": server.tail.after(0)}))
    with watched(page, origin=file.as_uri()):
        await page.goto(file.as_uri())
        await expect(page.locator("#sentence")).to_contain_text("wait for rank 1")
        await page.keyboard.press("9")
        await expect(page.locator(".log")).to_contain_text("hello from rank 2")
        await page.keyboard.press("0")
        await expect(page.locator("#main")).to_contain_text("a report keeps no events")


async def test_the_flight_page_says_what_holds_the_job_up_and_filters_events(page: Page) -> None:
    bad = "<img src=x onerror=alert(1)>"
    event = {
        "ticket": 7,
        "kind": "collective",
        "text": bad,
        "group": "world",
        "sequence": 4,
        "bytes": 4096,
        "site": "a.py:3",
    }

    async def look() -> dict[str, Any]:
        events = [
            event | {"rank": 0, "name": "all_reduce", "state": "started", "seconds": None},
            event | {"rank": 1, "name": "barrier", "state": "completed", "seconds": 0.002},
        ]
        finding = {"ranks": [1], "cause": "absent", "text": f"rank 0 waits for rank 1 {bad}"}
        return {"findings": [finding], "problems": ["rank 3: it is stopped"], "events": events, "ranks": 2}

    async with DashboardServer("127.0.0.1", 0, flight=look) as server:
        await show(server, 4, seconds=2)
        with watched(page, origin=f"http://{server.address}/"):
            await page.goto(server.url)
            await page.keyboard.press("0")
            await expect(page.locator(".findings")).to_contain_text("rank 1: absent. rank 0 waits for rank 1")
            await expect(page.locator(".findings")).to_contain_text("not read: rank 3: it is stopped")
            assert await page.locator("tbody tr").count() == 2
            await page.keyboard.press("/")
            await page.keyboard.type("r1 barrier")
            assert await page.locator("tbody tr").count() == 1
            assert await page.locator("img").count() == 0


async def test_gradients_and_pipeline_say_where_the_time_goes(server: DashboardServer, page: Page) -> None:
    with watched(page, origin=f"http://{server.address}/"):
        await page.goto(server.url)
        await page.click("#tab-gradients")
        await expect(page.locator(".figures")).to_contain_text("0.12 s")
        assert await page.locator("tbody tr").count() == 4
        await page.click("#tab-pipeline")
        await expect(page.locator(".legend").last).to_contain_text("backward weight")
        assert await page.locator("tbody tr").count() == 16
        assert await page.locator(".track").count() == 4


@pytest.mark.parametrize(("stages", "chunks"), first(1, [(4, 2), (16, 1), (2, 1)]))
async def test_the_schedule_is_drawn_as_it_ran_and_read_by_keys(page: Page, stages: int, chunks: int) -> None:
    run = draw_run(record_pipeline(stages, micro_batches=2 * stages, chunks=chunks))
    assert run is not None
    async with DashboardServer("127.0.0.1", 0) as server:
        (job,) = SyntheticJob(stages).summaries(1)
        await server.show(Painter().paint(job, schedule=run))
        with watched(page, origin=f"http://{server.address}/"):
            await page.goto(server.url)
            await page.click("#tab-pipeline")
            await expect(page.locator(".strip .idle")).to_have_count(stages)
            await expect(page.locator(".strip .forward")).to_have_count(2 * stages * stages * chunks)
            await expect(page.locator(".strip .backward")).to_have_count(2 * stages * stages * chunks)
            assert await page.locator(".strip .chunk1").count() == (4 * stages * stages if chunks > 1 else 0)
            await expect(page.locator("#main")).to_contain_text(f"run {run['run']}")
            await expect(page.locator("#main")).to_contain_text("% idle")
            await page.focus(".strip")
            await page.keyboard.press("ArrowRight")
            await expect(page.locator("#tip")).to_contain_text("rank 0, stage 0: forward of micro-batch 0")
            await page.keyboard.press("ArrowDown")
            await expect(page.locator("#tip")).to_contain_text("rank 1, stage 1: forward of micro-batch 0")
            await expect(page.locator("#tab-pipeline")).to_have_attribute("aria-selected", "true")
            rights = "[...document.querySelectorAll('.strip rect')].map(one => one.getBoundingClientRect().right)"
            assert await page.evaluate(f"Math.max(...{rights}) <= innerWidth")


async def test_calls_that_wait_for_each_other_and_dead_letters_are_on_the_actors_page(page: Page) -> None:
    async with DashboardServer("127.0.0.1", 0) as server:
        await show(server, 8, seconds=2)
        with watched(page, origin=f"http://{server.address}/"):
            await page.goto(server.url)
            await page.click("#tab-actors")
            await expect(page.locator(".chains li")).to_have_text(
                "ranks 1, 5→ sampler.draw rank 0, 400 ms→ store.read rank 7, 300 mswhich runs read()"
            )
            await expect(page.locator("#main")).to_contain_text("3 in all, the last are listed")
            await expect(page.locator("tbody").last).to_contain_text("logger.write")

            await show(server, 1, seconds=2)
            await expect(page.locator(".chains")).to_contain_text("No call waits for another one")
            await expect(page.locator("#main")).to_contain_text("No dead letters")


async def test_the_output_of_one_rank_is_read_at_its_agent(page: Page) -> None:
    asked = []

    async def read(ranks: Sequence[int]) -> list[dict[str, Any]]:
        asked.append(list(ranks))
        return [{"rank": rank, "text": f"from the agent of {rank}", "error": False} for rank in ranks]

    async with DashboardServer("127.0.0.1", 0, output=read) as server:
        await show(server, 4, seconds=2)
        server.tail.add(b"from everywhere", rank=3)
        with watched(page, origin=f"http://{server.address}/"):
            await page.goto(server.url)
            await page.keyboard.press("9")
            await expect(page.locator(".log")).to_contain_text("from everywhere")
            await page.keyboard.press("/")
            await page.keyboard.type("r2")
            await expect(page.locator(".log")).to_contain_text("from the agent of 2")
            await expect(page.locator(".log div")).to_have_count(1)
            await page.keyboard.press("Control+A")
            await page.keyboard.press("Delete")
            await expect(page.locator(".log")).to_contain_text("from everywhere")
    assert [2] in asked
    assert all(len(ranks) == 1 for ranks in asked)
