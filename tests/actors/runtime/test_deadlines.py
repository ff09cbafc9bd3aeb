"""Deadlines travel: what a caller's timeout means to the endpoint, and to those it calls itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from asyncpar.actors.runtime import message
from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.actors.runtime.callee import GRACE
from asyncpar.actors.runtime.calls import CURRENT, Delivery, time_left
from asyncpar.actors.runtime.window import WINDOW, ReceiveWindow
from asyncpar.errors import PeerTimeout
from asyncpar.net.wire.payload import PayloadEncoder
from asyncpar.testing.loop import run_virtual

SOON = 0.02
"""Seconds until a deadline has been found and has travelled."""


class Clock(Actor):
    """Says how much time is left."""

    def __init__(self, log: list[tuple[str, float]] | None = None) -> None:
        self.log = [] if log is None else log
        self.left_behind: asyncio.Task[None] | None = None

    @endpoint
    async def left(self, after: float) -> float | None:
        try:
            await asyncio.sleep(after)
        except asyncio.CancelledError:
            self.log.append(("cancelled", asyncio.get_running_loop().time()))
            raise
        return time_left()

    @endpoint
    async def ask(self, other: Clock, before: float, after: float) -> float | None:
        await asyncio.sleep(before)
        return await other.left(after)

    @endpoint
    async def ask_with_less(self, other: Clock, seconds: float) -> float | None:
        async with asyncio.timeout(seconds):
            return await other.left(SOON)

    @endpoint
    async def leave_behind(self, after: float) -> None:
        async def work() -> None:
            await asyncio.sleep(after)
            self.log.append(("left behind", -1.0 if time_left() is None else 1.0))

        await asyncio.sleep(SOON)
        self.left_behind = asyncio.create_task(work())

    @endpoint
    async def ticks(self, count: int) -> AsyncIterator[float | None]:
        for _ in range(count):
            await asyncio.sleep(1)
            yield time_left()

    @endpoint
    async def read(self, items: AsyncIterator[int]) -> float | None:
        async for _ in items:
            await asyncio.sleep(1)
        return time_left()

    @endpoint
    async def swallow(self, array: np.ndarray) -> float | None:
        await asyncio.sleep(1)
        return time_left()

    @endpoint
    async def note(self, text: str) -> None:
        self.log.append((text, asyncio.get_running_loop().time()))


Log = list[tuple[str, float]]
Test = Callable[[Any, Clock, Clock, Log], Awaitable[None]]


def virtually(open_ranks: Any, test: Test) -> None:
    """Run ``test`` on virtual time with clocks on ranks 1 and 2, as rank 0 sees them, and the log of the first."""

    async def main() -> None:
        log: Log = []
        async with open_ranks(3) as ranks:
            await ranks.systems[1].spawn(Clock, log, name="c")
            await ranks.systems[2].spawn(Clock, name="c")
            first, second = (ranks.systems[0].ref("c", rank=rank, actor_class=Clock) for rank in (1, 2))
            await test(ranks, first, second, log)

    run_virtual(main())


def about(seconds: float) -> Any:
    return pytest.approx(seconds, abs=0.001)


@pytest.mark.promise("deadline")
def test_a_timeout_at_the_caller_is_seen_by_the_endpoint(open_ranks: Any) -> None:
    async def test(ranks: Any, first: Clock, second: Clock, log: Log) -> None:
        async with asyncio.timeout(10):
            assert await first.left(SOON) == about(10 - SOON)
            assert await first.left(1) == about(9 - SOON)
        assert await first.left(1) is None

    virtually(open_ranks, test)


def test_other_ways_to_set_a_timeout_are_seen(open_ranks: Any) -> None:
    async def test(ranks: Any, first: Clock, second: Clock, log: Log) -> None:
        assert await asyncio.wait_for(first.left(1), 10) == about(9)
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            child = group.create_task(first.left(1))
        assert child.result() == about(9)

    virtually(open_ranks, test)


@pytest.mark.promise("deadline")
def test_calls_inside_inherit_the_deadline(open_ranks: Any) -> None:
    async def test(ranks: Any, first: Clock, second: Clock, log: Log) -> None:
        async with asyncio.timeout(10):
            assert await first.ask(second, 1, 0) == about(9)

    virtually(open_ranks, test)


def test_calls_inside_learn_of_a_deadline_that_is_found_after_they_were_made(open_ranks: Any) -> None:
    async def test(ranks: Any, first: Clock, second: Clock, log: Log) -> None:
        async with asyncio.timeout(10):
            assert await first.ask(second, 0, 1) == about(9)

    virtually(open_ranks, test)


def test_the_earlier_of_the_inherited_and_the_own_deadline_counts(open_ranks: Any) -> None:
    async def test(ranks: Any, first: Clock, second: Clock, log: Log) -> None:
        async with asyncio.timeout(10):
            assert await first.ask_with_less(second, 5) == about(5 - SOON)
        async with asyncio.timeout(5):
            assert await first.ask_with_less(second, 10) == about(5 - SOON)

    virtually(open_ranks, test)


def test_a_caller_that_gives_up_in_time_ends_the_endpoint_at_once(open_ranks: Any) -> None:
    async def test(ranks: Any, first: Clock, second: Clock, log: Log) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10):
                await first.left(100)
        await first.left(0)
        assert log == [("cancelled", about(10))]

    virtually(open_ranks, test)


def call_once(ranks: Any, method: str, *arguments: object, seconds: float) -> None:
    """Call the clock on rank 1 as a caller that says how long it will wait, and then nothing any more."""
    parts = [msgspec.Raw(msgspec.msgpack.encode(argument)) for argument in arguments]
    envelope = message.CallMessage(10_000, "c", method, parts, {}, seconds)
    ranks.links[0].send_message(1, PayloadEncoder().finish(envelope, what="call"))


@pytest.mark.promise("deadline")
def test_an_endpoint_whose_caller_is_silent_is_cancelled_a_little_after_the_deadline(open_ranks: Any) -> None:
    async def test(ranks: Any, first: Clock, second: Clock, log: Log) -> None:
        call_once(ranks, "left", 100, seconds=3)
        await asyncio.sleep(5)
        assert log == [("cancelled", about(3 + GRACE))]
        assert ranks.systems[1].pending == 0

    virtually(open_ranks, test)


def test_a_message_whose_deadline_passes_in_the_mailbox_is_never_handled(open_ranks: Any) -> None:
    async def test(ranks: Any, first: Clock, second: Clock, log: Log) -> None:
        busy = asyncio.ensure_future(first.left(10))
        await asyncio.sleep(1)
        call_once(ranks, "note", "late", seconds=3)
        await busy
        await first.note("after")
        assert [text for text, _ in log] == ["after"]

    virtually(open_ranks, test)


def test_a_caller_that_waits_on_gets_a_peer_timeout(open_ranks: Any) -> None:
    async def test(ranks: Any, first: Clock, second: Clock, log: Log) -> None:
        origin = Delivery(
            0, None, "x", "y", [], {}, memoryview(b""), ReceiveWindow(), 0, asyncio.get_running_loop().time() + 3
        )
        token = CURRENT.set(origin)
        with pytest.raises(PeerTimeout, match=r"rank 1: left of .*: the deadline passed while it ran") as caught:
            await first.left(100)
        CURRENT.reset(token)
        assert caught.value.rank == 1
        assert asyncio.get_running_loop().time() == about(3 + GRACE)

    virtually(open_ranks, test)


def test_a_timeout_that_is_moved_while_the_endpoint_runs_moves_its_deadline(open_ranks: Any) -> None:
    async def test(ranks: Any, first: Clock, second: Clock, log: Log) -> None:
        async with asyncio.timeout(2) as timeout:
            asyncio.get_running_loop().call_later(1, timeout.reschedule, 20)
            assert await first.left(5) == about(15)
        async with asyncio.timeout(2) as timeout:
            asyncio.get_running_loop().call_later(1, timeout.reschedule, None)
            assert await first.ask(second, 0, 5) is None

    virtually(open_ranks, test)


def test_a_call_that_waits_for_room_learns_its_deadline_when_it_leaves(open_ranks: Any) -> None:
    async def test(ranks: Any, first: Clock, second: Clock, log: Log) -> None:
        large = np.zeros(WINDOW, np.uint8)
        others = [asyncio.ensure_future(first.swallow(large)) for _ in range(2)]
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            assert await first.swallow(large) == about(7)
        assert await asyncio.gather(*others) == [None, None]

    virtually(open_ranks, test)


def test_what_an_endpoint_leaves_behind_has_no_deadline(open_ranks: Any) -> None:
    async def test(ranks: Any, first: Clock, second: Clock, log: Log) -> None:
        async with asyncio.timeout(3):
            await first.leave_behind(10)
        await first.left(11)
        assert log == [("left behind", -1.0)]

    virtually(open_ranks, test)


def test_a_timeout_around_a_loop_is_seen_by_the_stream(open_ranks: Any) -> None:
    async def test(ranks: Any, first: Clock, second: Clock, log: Log) -> None:
        async with asyncio.timeout(10):
            assert [left async for left in first.ticks.stream(3)] == [about(9), about(8), about(7)]

    virtually(open_ranks, test)


def test_a_timeout_around_one_step_does_not_end_the_stream(open_ranks: Any) -> None:
    async def test(ranks: Any, first: Clock, second: Clock, log: Log) -> None:
        stream = first.ticks.stream(5)
        lefts = []
        for _ in range(5):
            async with asyncio.timeout(2):
                lefts.append(await anext(stream))
        assert lefts == [None] * 5

    virtually(open_ranks, test)


def test_a_call_that_brings_a_stream_has_a_deadline_like_others(open_ranks: Any) -> None:
    async def numbers() -> AsyncIterator[int]:
        for n in range(3):
            yield n

    async def test(ranks: Any, first: Clock, second: Clock, log: Log) -> None:
        async with asyncio.timeout(10):
            assert await first.read(numbers()) == about(7)

    virtually(open_ranks, test)


def test_quick_calls_leave_no_timer_behind(open_ranks: Any) -> None:
    async def test(ranks: Any, first: Clock, second: Clock, log: Log) -> None:
        async with asyncio.timeout(1000):
            await first.left(0)
            await first.left(1)
        before = asyncio.get_running_loop().time()
        await asyncio.sleep(1)
        assert asyncio.get_running_loop().time() == about(before + 1)
        assert [deadlines_idle(system) for system in ranks.systems] == [True] * 3

    virtually(open_ranks, test)


def deadlines_idle(system: Any) -> bool:
    return bool(system._caller.deadlines._sweeper.is_idle) and not system._callee._expiry.is_ticking  # noqa: SLF001  # timers that go on for nothing show nowhere else
