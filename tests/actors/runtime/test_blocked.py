"""Actors that block the event loop are reported by name, with their stack, and everything goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import asyncpar as ap
from asyncpar.actors.runtime.actor import Actor
from asyncpar.core.observe.loop_watch import Blocked
from asyncpar.net.wire import array as wire_array
from asyncpar.net.wire import payload
from asyncpar.testing.loop import run_virtual

Array = npt.NDArray[np.float64]

LIMIT = 30.0


class Reports:
    """The reports that an observer got of what begins with ``whose``; ``wait`` blocks its caller's thread, on purpose.

    On a busy machine everything else may block the loop for long enough to be reported, too.
    """

    def __init__(self, whose: str) -> None:
        self.whose = whose
        self.seen: list[Blocked] = []
        self._news = threading.Condition()

    def __call__(self, blocked: Blocked) -> None:
        if not blocked.what.startswith(self.whose):
            return
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
async def watched(whose: str = "", **settings: Any) -> AsyncIterator[tuple[ap.Node, Reports]]:
    node = await ap.Node.start(**settings)
    reports = Reports(whose)
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
    async with watched(f"actor 'culprit', endpoint {endpoint}") as (node, reports):
        ref = await node.spawn(Blocker, reports, name="culprit")
        assert await CALLS[endpoint](ref) in (1, 2, 3)
        await asyncio.to_thread(reports.wait, 2)
    first, second = reports.seen
    assert (first.rank, first.what, first.is_over) == (0, f"actor 'culprit', endpoint {endpoint}", False)
    assert first.seconds >= 0.1
    assert f"in {endpoint}\n    self.reports.wait(1)" in first.stack
    assert first.stack.startswith(f'  File "{__file__}"')
    assert (second.what, second.is_over) == (first.what, True)
    logged = [(record.name, text) for record, text in zip(caplog.records, caplog.messages, strict=True)]
    name, _ = next(
        one for one in logged if f"actor 'culprit', endpoint {endpoint} has blocked the event loop" in one[1]
    )
    assert name == "asyncpar.runtime"


async def test_a_told_message_and_a_hook_that_block_are_reported_too() -> None:
    async with watched("actor 'busy', endpoint block") as (node, reports):
        ref: Any = await node.spawn(Blocker, reports, name="busy")
        await ref.block.tell()
        await asyncio.to_thread(reports.wait, 2)
    assert reports.seen[0].what == "actor 'busy', endpoint block"
    async with watched("actor 'starting'") as (node, reports):
        await node.spawn(Blocker, reports, at_start=True, name="starting")
        await asyncio.to_thread(reports.wait, 2)
    assert reports.seen[0].what == "actor 'starting'"
    assert "in on_start" in reports.seen[0].stack


async def test_a_plain_def_endpoint_runs_in_a_thread_and_blocks_nobody() -> None:
    async with watched("actor 'threaded'", blocked_after=0.05) as (node, reports):
        ref: Any = await node.spawn(Blocker, reports, name="threaded")
        assert (await ref.block_in_a_thread(0.3)).startswith("actor threaded")
        assert reports.seen == []


async def test_the_watch_runs_while_there_is_a_node_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())  # a thread of an earlier test may still be on its way out
    async with watched() as (node, reports):
        assert [thread.name for thread in set(threading.enumerate()) - before] == ["asyncpar loop watch"]
        await node.spawn(Blocker, reports)
        assert [thread.name for thread in set(threading.enumerate()) - before] == ["asyncpar loop watch"]
    assert set(threading.enumerate()) <= before


async def test_a_program_without_actors_that_blocks_the_loop_is_reported_and_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with watched("task ") as (_, reports):
        reports.wait(1)  # blocks, in this task
        await asyncio.to_thread(reports.wait, 2)
    first, second = reports.seen[:2]
    assert first.what.startswith("task ")
    assert f'File "{__file__}"' in first.stack
    assert (first.is_over, second.is_over) == (False, True)
    assert not [text for text in caplog.messages if "blocked" in text]


def test_a_loop_in_virtual_time_is_not_watched() -> None:
    before = set(threading.enumerate())

    async def main() -> None:
        async with watched() as (node, reports):
            await node.spawn(Blocker, reports)
            assert set(threading.enumerate()) <= before
            await asyncio.sleep(1000.0)

    run_virtual(main())


@pytest.mark.parametrize("off", [0, None])
async def test_the_watch_can_be_turned_off(off: float | None) -> None:
    before = set(threading.enumerate())
    async with watched(blocked_after=off) as (node, reports):
        await node.spawn(Blocker, reports)
        assert set(threading.enumerate()) <= before


async def test_a_limit_that_is_none_is_refused() -> None:
    with pytest.raises(ap.UsageError, match="blocked_after: expected up to 3600 seconds"):
        await ap.Node.start(blocked_after=-1)


class Holder(Actor):
    """Has messages and results of which copying blocks the loop."""

    @ap.endpoint
    async def tell_itself(self) -> None:
        self.ref.swallow.tell(np.zeros(8))

    @ap.endpoint
    async def swallow(self, x: Array) -> None:
        """Do nothing."""

    @ap.endpoint(concurrency=2)
    async def hand_out(self) -> Array:
        return np.zeros(8)


async def _tell(ref: Any) -> None:
    ref.swallow.tell(np.zeros(8))


COPIES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a tell of a task": (_tell, "task 'the teller'"),
    "a tell of an actor": (lambda ref: ref.tell_itself(), "actor 'holder', endpoint tell_itself"),
    "a result": (lambda ref: ref.hand_out(), "actor 'holder', endpoint hand_out"),
}


@pytest.mark.promise("blocked")
@pytest.mark.parametrize("copied", COPIES)
async def test_asyncpar_is_blamed_for_its_own_copies(copied: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, whom = COPIES[copied]
    is_reported = threading.Lock()
    is_reported.acquire()
    source = "def write_array(array, memory, offset):\n    is_reported.acquire(timeout=30)\n"
    slow: dict[str, Any] = {"is_reported": is_reported}
    exec(compile(source, wire_array.__file__, "exec"), slow)  # blocks as copying does: in C, called there
    monkeypatch.setattr(payload, "write_array", slow["write_array"])
    async with watched("asyncpar itself") as (node, reports):

        def release(blocked: Blocked) -> None:
            if blocked.what.startswith("asyncpar itself") and not blocked.is_over:
                is_reported.release()

        node.on_blocked(release)
        ref: Any = await node.spawn(Holder, name="holder")
        await asyncio.create_task(call(ref), name="the teller")
        await asyncio.to_thread(reports.wait, 2)
    assert reports.seen[0].what == f"asyncpar itself (array.write_array) for {whom}"
