"""Tests of the access to the dashboard, and of browsers that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from asyncpar.dashboard.app import MOST_BROWSERS, MOST_READ
from asyncpar.dashboard.picture import Painter
from asyncpar.dashboard.server import DashboardServer
from asyncpar.errors import UsageError
from asyncpar.testing.jobs import SyntheticJob
from tests.dashboard.conftest import show

pytestmark = pytest.mark.asyncio(loop_scope="module")


@asynccontextmanager
async def shown() -> AsyncIterator[DashboardServer]:
    """A dashboard that shows a job of four ranks."""
    async with DashboardServer("127.0.0.1", 0, names=["hub.example.org"]) as serving:
        await show(serving, 4)
        yield serving


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[DashboardServer]:
    """A dashboard for all that only ask."""
    async with shown() as serving:
        yield serving


@pytest_asyncio.fixture(loop_scope="module")
async def changed() -> AsyncIterator[DashboardServer]:
    """A dashboard for a test that changes what it shows."""
    async with shown() as serving:
        yield serving


async def ask(
    server: DashboardServer, path: str = "events", *, token: str | None = None, **headers: str
) -> tuple[int, str]:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    if token is not None:
        given["Authorization"] = f"Bearer {token}"
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{server.address}/{path}", headers=given) as answer,
    ):
        body = await (answer.content.readuntil(b"\n\n") if answer.ok and path == "events" else answer.read())
        return answer.status, body.decode()


@pytest.mark.parametrize("path", ["events", "lines", "output", "report", "flight"])
@pytest.mark.parametrize("token", [None, "", "wrong"])
async def test_without_the_token_nothing_is_shown(server: DashboardServer, path: str, token: str | None) -> None:
    status, body = await ask(server, path, token=token)

    assert status == 401
    assert "gpt-small" not in body


@pytest.mark.parametrize("path", ["events", "lines", "output", "report", "flight", ""])
@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example:80", "user@localhost", "", "[::1", "127.0.0.2"]
)
async def test_a_name_that_is_not_ours_is_refused(server: DashboardServer, path: str, host: str) -> None:
    """The page of somebody else whose name now leads here (DNS rebinding)."""
    assert (await ask(server, path, token=server.token, Host=host))[0] in (400, 403)


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:1", "file://", "http://[", "x"])
async def test_a_page_of_another_origin_is_refused(server: DashboardServer, origin: str) -> None:
    assert (await ask(server, token=server.token, Origin=origin))[0] == 403


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:9999", "http://localhost:9999"),  # ssh -L 9999:...
        ("[::1]:8787", "http://[::1]:8787"),
        ("hub.example.org", "https://hub.example.org"),  # JupyterHub's proxy
        ("localhost:8787", "https://hub.example.org"),
        ("HUB.example.org.", None),
    ],
)
async def test_tunnels_and_named_proxies_are_served(server: DashboardServer, host: str, origin: str | None) -> None:
    headers = {"Host": host} | ({} if origin is None else {"Origin": origin})

    status, body = await ask(server, token=server.token, **headers)

    assert status == 200
    assert json.loads(body.removeprefix("data: "))["job"] == "gpt-small"


async def test_a_fetch_that_another_site_makes_is_refused(server: DashboardServer) -> None:
    assert (await ask(server, token=server.token, Sec_Fetch_Site="cross-site"))[0] == 403


async def test_a_browser_that_leaves_is_forgotten(changed: DashboardServer) -> None:
    headers = {"Authorization": f"Bearer {changed.token}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        answers = [await session.get(f"http://{changed.address}/events") for _ in range(MOST_BROWSERS)]
        assert changed.dashboard.browsers == MOST_BROWSERS
        async with session.get(f"http://{changed.address}/events") as more:
            assert more.status == 503
        for answer in answers:
            answer.close()

    async with asyncio.timeout(30):
        while changed.dashboard.browsers:
            await show(changed, 4, seconds=1)
            await asyncio.sleep(0.01)


async def test_a_browser_that_reads_nothing_holds_nobody_up_and_gets_the_latest(changed: DashboardServer) -> None:
    headers = {"Authorization": f"Bearer {changed.token}"}
    async with (
        aiohttp.ClientSession(headers=headers, read_bufsize=1024) as session,
        session.get(f"http://{changed.address}/events") as answer,
    ):
        (job,) = SyntheticJob(64).summaries(1)
        picture = Painter().paint(job)
        for second in range(100):  # 8 MB in all
            await changed.show(picture | {"time": picture["time"] + second})

        seen: list[float] = []
        text = b""
        while not seen or seen[-1] < picture["time"] + 99:
            async with asyncio.timeout(30):
                text += await answer.content.readany()
            *whole, text = text.split(b"\n\n")
            seen += [json.loads(event.removeprefix(b"data: "))["time"] for event in whole]

    assert len(seen) < 80


async def test_an_address_that_is_taken_is_a_usage_error(server: DashboardServer) -> None:
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(UsageError, match=r"--dashboard: .* cannot be bound"):
        async with DashboardServer("127.0.0.1", port):
            pass


async def test_the_output_of_a_few_ranks_is_read_at_their_agents() -> None:
    asked = []

    async def read(ranks: Sequence[int]) -> list[dict[str, Any]]:
        asked.append(list(ranks))
        return [{"rank": rank, "text": "hello", "error": False} for rank in ranks]

    async with DashboardServer("127.0.0.1", 0, output=read) as serving:
        status, body = await ask(serving, "output?ranks=3,70,3", token=serving.token)
        assert (status, [line["rank"] for line in json.loads(body)]) == (200, [3, 70])
        for bad in ("", "x", "-1", "1,", "1,,2", "99999999", ",".join(map(str, range(MOST_READ + 1))), "٣"):
            assert (await ask(serving, f"output?ranks={bad}", token=serving.token))[0] == 400, bad
    assert asked == [[3, 70]]

    async with DashboardServer("127.0.0.1", 0) as without:
        assert (await ask(without, "output?ranks=1", token=without.token))[0] == 404


async def test_lines_after_a_number(changed: DashboardServer) -> None:
    for number in range(5):
        changed.tail.add(b"line %d \xff" % number, rank=number, error=number == 4)

    status, body = await ask(changed, "lines?after=3", token=changed.token)

    assert [line["n"] for line in json.loads(body)] == [4, 5]
    assert json.loads(body)[1] == {"n": 5, "rank": 4, "text": "line 4 \ufffd", "error": True}
    for bad in ("-1", "x", "9" * 40, "٣"):
        assert (await ask(changed, f"lines?after={bad}", token=changed.token))[0] == 400
    assert status == 200


async def test_the_report_has_the_data_inside_and_cannot_be_broken_out_of(changed: DashboardServer) -> None:
    changed.tail.add(b"</script><script>alert(1)</script>", rank=0)

    status, html = await ask(changed, "report", token=changed.token)

    assert status == 200
    assert "<script>alert(1)" not in html
    inside = html.partition('id="document">')[2].partition("</script>")[0]
    assert json.loads(inside)["lines"][0]["text"] == "</script><script>alert(1)</script>"
    assert changed.token not in html


async def test_browsers_that_look_at_the_flight_records_together_ask_the_ranks_once() -> None:
    inspections = 0

    async def look() -> dict[str, Any]:
        nonlocal inspections
        inspections += 1
        await asyncio.sleep(0.01)
        return {"findings": [], "problems": [], "events": [], "ranks": 3}

    async with DashboardServer("127.0.0.1", 0, flight=look) as serving:
        handle: Any = serving.dashboard._serve_flight  # noqa: SLF001  # requests over a network would not be sure to meet
        answers = await asyncio.gather(*(handle(None) for _ in range(5)))
        assert inspections == 1
        assert {json.loads(answer.body)["ranks"] for answer in answers} == {3}
        assert (await ask(serving, "flight", token=serving.token))[0] == 200
        assert inspections == 2

    async with DashboardServer("127.0.0.1", 0) as without:
        assert (await ask(without, "flight", token=without.token))[0] == 404
