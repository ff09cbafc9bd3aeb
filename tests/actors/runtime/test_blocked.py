"""Actors that block the event loop are reported by name, with their stack, and everything goes on."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import asyncpar as ap
from asyncpar.actors.runtime import culprit
from asyncpar.actors.runtime.actor import Actor
from asyncpar.core.observe.loop_watch import Blocked

LIMIT = 30.0


class Reports:
    """What an observer was told; ``wait`` blocks the thread that calls it, on purpose."""

    def __init__(self) -> None:
        self.seen: list[Blocked] = []
        self._news = threading.Condition()

    def __call__(self, blocked: Blocked) -> None:
        with self._news:
            self.seen.append(blocked)
            self._news.notify_all()

    def wait(self, count: int) -> None:
        with self._news:
            assert self._news.wait_for(lambda: len(self.seen) >= count, LIMIT)


class Blocker(Actor):
    """Blocks the loop until that was reported."""

    def __init__(self, reports: Reports, *, at_start: bool = False) -> None:
        self.reports = reports
        self.at_start = at_start

    async def on_start(self) -> None:
        await asyncio.sleep(0)
        if self.at_start:
            self.reports.wait(1)

    @ap.endpoint
    async def block(self) -> int:
        await asyncio.sleep(0)
        self.reports.wait(1)
        return 1

    @ap.endpoint(concurrency=2)
    async def block_beside(self) -> int:
        self.reports.wait(1)
        return 2

    @ap.endpoint
    async def block_streaming(self) -> AsyncIterator[int]:
        self.reports.wait(1)
        yield 3

    @ap.endpoint
    def block_in_a_thread(self, until: float) -> str:
        threading.Event().wait(until)
        return threading.current_thread().name


@asynccontextmanager
async def watched(**settings: Any) -> AsyncIterator[tuple[ap.Node, Reports]]:
    node = await ap.Node.start(**settings)
    reports = Reports()
    node.on_blocked(reports)
    try:
        yield node, reports
    finally:
        await node.stop()


async def _first(items: AsyncIterator[int]) -> int:
    return await anext(items)


CALLS: dict[str, Callable[[Any], Any]] = {
    "block": lambda ref: ref.block(),
    "block_beside": lambda ref: ref.block_beside(),
    "block_streaming": lambda ref: _first(ref.block_streaming.stream()),
}


@pytest.mark.promise("blocked")
@pytest.mark.parametrize("endpoint", CALLS)
async def test_an_endpoint_that_blocks_the_loop_is_reported_by_name_with_its_stack(
    endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with watched() as (node, reports):
        ref = await node.spawn(Blocker, reports, name="culprit")
        assert await CALLS[endpoint](ref) in (1, 2, 3)
        await asyncio.to_thread(reports.wait, 2)
    first, second = reports.seen
    assert (first.rank, first.what, first.is_over) == (0, f"actor 'culprit', endpoint {endpoint}", False)
    assert first.seconds >= 0.1
    assert f"in {endpoint}\n    self.reports.wait(1)" in first.stack
    assert first.stack.startswith(f'  File "{__file__}"')
    assert (second.what, second.is_over) == (first.what, True)
    assert caplog.records[0].name == "asyncpar.runtime"
    assert f"actor 'culprit', endpoint {endpoint} has blocked the event loop for 0.1" in caplog.messages[0]


async def test_a_told_message_and_a_hook_that_block_are_reported_too() -> None:
    async with watched() as (node, reports):
        ref: Any = await node.spawn(Blocker, reports, name="told")
        await ref.block.tell()
        await asyncio.to_thread(reports.wait, 2)
    assert reports.seen[0].what == "actor 'told', endpoint block"
    async with watched() as (node, reports):
        await node.spawn(Blocker, reports, at_start=True, name="starting")
        await asyncio.to_thread(reports.wait, 2)
    assert reports.seen[0].what == "actor 'starting'"
    assert "in on_start" in reports.seen[0].stack


async def test_a_plain_def_endpoint_runs_in_a_thread_and_blocks_nobody() -> None:
    async with watched(blocked_after=0.05) as (node, reports):
        ref: Any = await node.spawn(Blocker, reports, name="threaded")
        assert (await ref.block_in_a_thread(0.3)).startswith("actor threaded")
        assert reports.seen == []


async def test_the_watch_runs_while_there_are_actors_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())  # a thread of an earlier test may still be on its way out
    async with watched() as (node, reports):
        assert set(threading.enumerate()) <= before
        await node.spawn(Blocker, reports)
        assert [thread.name for thread in set(threading.enumerate()) - before] == ["asyncpar loop watch"]
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("off", [0, None])
async def test_the_watch_can_be_turned_off(off: float | None) -> None:
    before = set(threading.enumerate())
    async with watched(blocked_after=off) as (node, reports):
        await node.spawn(Blocker, reports)
        assert set(threading.enumerate()) <= before


async def test_a_limit_that_is_none_is_refused() -> None:
    with pytest.raises(ap.UsageError, match="blocked_after: expected up to 3600 seconds"):
        await ap.Node.start(blocked_after=-1)


def test_asyncpar_is_blamed_for_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a very large result is copied: then the endpoint is over, and it is not its fault."""
    here = sys._getframe()  # noqa: SLF001  # documented in the library reference; a frame of this test is the one that is blamed
    monkeypatch.setattr(culprit, "_describe_actor", lambda frame: "actor 'giver', endpoint give")
    assert culprit.describe_culprit(here) == "actor 'giver', endpoint give"
    monkeypatch.setattr(culprit, "_PACKAGE", str(Path(__file__).parent))
    said = "asyncpar itself (test_blocked.test_asyncpar_is_blamed_for_its_own_code) for actor 'giver', endpoint give"
    assert culprit.describe_culprit(here) == said
    monkeypatch.setattr(culprit, "_describe_actor", lambda frame: None)
    assert culprit.describe_culprit(here) is None
