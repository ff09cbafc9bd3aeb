"""What comes in the same turn, or in the other order, neither hangs nor loses anything."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import time
import weakref
from typing import ClassVar

import pytest

from asyncpar.errors import ActorDown, PeerLost
from asyncpar.runtime.actor import Actor, endpoint
from asyncpar.runtime.backlog import BURST
from asyncpar.runtime.dead_letters import DeadLetter
from asyncpar.runtime.down import Down, DownReason
from asyncpar.runtime.mailbox import Mailbox
from asyncpar.runtime.watches import Watch
from asyncpar.runtime.window import OVERHEAD, WINDOW, Parcel, SendWindow
from tests.runtime.conftest import OpenRanks

MEBIBYTE = 1 << 20


class Plain(Actor):
    """Waits, counts, and starts children."""

    def __init__(self, seen: list[str] | None = None) -> None:
        self.seen = [] if seen is None else seen
        self.gate = asyncio.Event()

    @endpoint
    async def wait(self) -> None:
        await self.gate.wait()

    @endpoint(concurrency=1)
    async def open(self) -> None:
        self.gate.set()

    @endpoint
    async def note(self, text: str) -> None:
        self.seen.append(text)

    @endpoint
    async def fail(self) -> None:
        raise ValueError("it failed")

    @endpoint
    async def name_of(self) -> str:
        return self.name


class Careless(Plain):
    """Its ``on_stop`` raises."""

    async def on_stop(self) -> None:
        raise LookupError("nothing to stop")

    @endpoint
    async def leave(self) -> None:
        self.stop_self()


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# -- names -----------------------------------------------------------------------------------------------------------


async def test_a_name_of_its_own_is_none_that_another_actor_was_given(open_ranks: OpenRanks) -> None:
    async with open_ranks(1) as ranks, asyncio.timeout(10):
        (system,) = ranks.systems
        given = await system.spawn(Plain, name="Plain-1")
        own = [await system.spawn(Plain), await system.spawn(Plain)]
        names = [await ref.name_of() for ref in (given, *own)]
        assert len(set(names)) == 3


# -- the event loop --------------------------------------------------------------------------------------------------


class Again(Actor):
    """Tells itself, for ever."""

    count = 0
    is_enough = False

    @endpoint(concurrency=2)
    async def beside(self) -> None:
        self.count += 1
        if self.count > 100 * BURST:
            raise AssertionError("the event loop had no turn")
        if not self.is_enough:
            self.ref.beside.tell()

    @endpoint
    async def enough(self) -> int:
        self.is_enough = True
        return self.count


async def test_a_concurrent_endpoint_that_tells_itself_leaves_turns_to_others(open_ranks: OpenRanks) -> None:
    async with open_ranks(1) as ranks, asyncio.timeout(10):
        ref = await ranks.systems[0].spawn(Again)
        ref.beside.tell()
        await turns(3)
        assert await ref.enough() > 0


def test_dropping_many_queued_parcels_takes_no_quadratic_time() -> None:
    window = SendWindow()
    window.put(Parcel(memoryview(bytes(WINDOW))))
    parcels = [Parcel(memoryview(b"")) for _ in range(20_000)]
    for parcel in parcels:
        window.put(parcel)
    begin = time.process_time()
    for parcel in reversed(parcels):
        assert window.drop(parcel)
    assert time.process_time() - begin < 1.0
    assert window.credit(WINDOW + OVERHEAD) is None
    assert window.next() is None
    assert window.is_idle


# -- credit ----------------------------------------------------------------------------------------------------------


class Latest(Actor):
    mailbox: ClassVar[Mailbox] = Mailbox(limit=2, when_full="drop_oldest")

    def __init__(self, gate: asyncio.Event) -> None:
        self.gate = gate
        self.taken: list[int] = []

    @endpoint
    async def wait(self) -> None:
        await self.gate.wait()

    @endpoint
    async def take(self, number: int, block: bytes) -> None:
        self.taken.append(number)

    @endpoint
    async def taken_so_far(self) -> list[int]:
        return self.taken


async def test_messages_that_waited_at_their_sender_keep_their_order_when_others_are_dropped(
    open_ranks: OpenRanks,
) -> None:
    async with open_ranks(1) as ranks, asyncio.timeout(20):
        (system,) = ranks.systems
        gate = asyncio.Event()
        ref = await system.spawn(Latest, gate)
        ref.wait.tell()
        await turns(3)
        ref.take.tell(0, bytes(WINDOW))
        for number in range(1, 11):
            ref.take.tell(number, bytes(5 * MEBIBYTE))
        gate.set()
        await turns(20)
        assert await ref.taken_so_far() == [0, 9, 10]


async def test_the_end_of_an_actor_with_a_long_queue_takes_no_deep_stack(open_ranks: OpenRanks) -> None:
    depths: list[int] = []

    def look(_: DeadLetter) -> None:
        frame, depth = sys._getframe(), 0
        while (back := frame.f_back) is not None:
            frame, depth = back, depth + 1
        depths.append(depth)

    async with open_ranks(1) as ranks, asyncio.timeout(20):
        (system,) = ranks.systems
        ref = await system.spawn(Plain)
        ref.wait.tell()
        await turns(3)
        block = "x" * (5 * MEBIBYTE)
        for _ in range(12):
            ref.note.tell(block)
        system.dead_letters.subscribe(look)
        await system.kill(ref)
    assert len(depths) >= 12
    assert max(depths) - min(depths) < 40


# -- ends ------------------------------------------------------------------------------------------------------------


class Bereaved(Actor):
    """Its hook takes for ever."""

    def __init__(self) -> None:
        self.heard = 0

    @endpoint
    async def nothing(self) -> None:
        pass

    async def on_down(self, down: Down) -> None:
        self.heard += 1
        await asyncio.get_running_loop().create_future()

    @endpoint
    async def follow(self, other: Plain) -> None:
        self.watch(other)


async def test_no_hook_begins_after_a_kill(open_ranks: OpenRanks) -> None:
    async with open_ranks(1) as ranks, asyncio.timeout(10):
        (system,) = ranks.systems
        ref, other = await system.spawn(Bereaved), await system.spawn(Plain)
        await ref.follow(other)
        cell = system._roster.cells["Bereaved-1"]
        for _ in range(BURST):  # the last one of a burst is followed by a turn for others
            ref.nothing.tell()
        await turns(1)
        cell.notify("on_down", Down(other, DownReason.STOPPED))  # type: ignore[arg-type]
        await system.kill(ref)


class LateParent(Plain):
    """Starts children when it is late for that."""

    later: asyncio.Task[Plain] | None = None

    async def on_stop(self) -> None:
        await self.spawn(Plain, name="born in on_stop")

    @endpoint
    async def spawn_later(self) -> None:
        LateParent.later = asyncio.create_task(self._spawn_later())

    async def _spawn_later(self) -> Plain:
        await asyncio.sleep(0.05)
        return await self.spawn(Plain, name="born after its owner's end")


async def test_a_child_that_on_stop_starts_ends_with_its_owner(open_ranks: OpenRanks) -> None:
    async with open_ranks(1) as ranks, asyncio.timeout(10):
        (system,) = ranks.systems
        await system.stop(await system.spawn(LateParent))
        with pytest.raises(ActorDown):
            await system.ref("born in on_stop").name_of()


async def test_an_actor_that_has_ended_has_no_more_children(open_ranks: OpenRanks) -> None:
    async with open_ranks(1) as ranks, asyncio.timeout(10):
        (system,) = ranks.systems
        ref = await system.spawn(LateParent)
        await ref.spawn_later()
        await system.stop(ref)
        assert LateParent.later is not None
        with pytest.raises(Exception, match="is ending, it can have no more children"):
            await LateParent.later


class Family(Actor):
    def __init__(self, kind: type[Plain] = Plain) -> None:
        self.kind = kind

    async def on_start(self) -> None:
        self.first = await self.spawn(self.kind, name="first")
        self.second = await self.spawn(self.kind, name="second")

    @endpoint
    async def fail_both(self) -> None:
        self.first.fail.tell()
        self.second.fail.tell()
        await asyncio.sleep(0.01)

    @endpoint
    async def nothing(self) -> None:
        pass


async def test_no_failure_of_a_child_is_lost_when_its_owner_fails_with_another_one(
    open_ranks: OpenRanks, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_ranks(1) as ranks, asyncio.timeout(10):
        (system,) = ranks.systems
        ref = await system.spawn(Family, name="family")
        watch = system.watch(ref)
        await ref.fail_both()
        assert (await watch).reason is DownReason.FAILED
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert [text.split(" failed")[0] for text in errors] == ["rank 0: actor 'family'", "rank 0: actor 'second'"]


async def test_what_on_stop_raises_is_logged_if_nobody_waits_for_it(
    open_ranks: OpenRanks, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_ranks(1) as ranks, asyncio.timeout(10):
        (system,) = ranks.systems
        await system.stop(await system.spawn(Family, Careless))
        alone = await system.spawn(Careless, name="alone")
        watch = system.watch(alone)
        await alone.leave()
        await watch
        with pytest.raises(LookupError):
            await system.stop(await system.spawn(Careless, name="waited for"))
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert [sum(f"'{name}'" in text for text in errors) for name in ("first", "second", "alone", "waited for")] == [
        1,
        1,
        1,
        0,
    ]


# -- watches ---------------------------------------------------------------------------------------------------------


async def _wait_for(watch: Watch) -> Down:
    return await watch


async def test_awaiting_a_watch_that_was_cancelled_raises_at_once(open_ranks: OpenRanks) -> None:
    async with open_ranks(1) as ranks, asyncio.timeout(10):
        (system,) = ranks.systems
        watch = system.watch(await system.spawn(Plain))
        watch.cancel()
        waiting = asyncio.ensure_future(_wait_for(watch))
        await turns(2)
        assert waiting.cancelled()


async def test_an_actor_that_has_ended_watches_nobody(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks, asyncio.timeout(10):
        here, there = ranks.systems
        other = await there.spawn(Plain, name="other")
        ref = await here.spawn(Bereaved)
        await ref.follow(other)
        cell = weakref.ref(here._roster.cells["Bereaved-1"])
        await here.stop(ref)
        await here.ref("other", rank=1).note("the unwatch has arrived before this")
        assert len(here._watches) == 0
        assert not there._roster.cells["other"].watchers
        del ref
        gc.collect()
        assert cell() is None


async def test_a_watch_that_begins_after_the_end_of_its_node_ends_at_once(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks, asyncio.timeout(10):
        here, there = ranks.systems
        await there.spawn(Plain, name="other")
        keeper = here._household
        await here.close()
        watch = keeper.watch(here.ref("other", rank=1), lambda _: None, set())
        assert watch.down is not None
        assert watch.down.reason is DownReason.CLOSED


# -- requests --------------------------------------------------------------------------------------------------------


async def test_a_remote_spawn_that_is_cancelled_at_any_step_leaves_nobody_behind(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks, asyncio.timeout(20):
        here, there = ranks.systems
        for steps in range(30):
            spawning = asyncio.ensure_future(here.spawn_on(1, Plain, name=f"child {steps}"))
            await turns(steps)
            was_done = spawning.done()
            spawning.cancel()
            await asyncio.wait({spawning})
            for _ in range(200):
                await asyncio.sleep(0)
            is_there = f"child {steps}" in there._roster.cells
            assert is_there == was_done, f"cancelled after {steps} turns"


class Slow(Plain):
    async def on_stop(self) -> None:
        await asyncio.get_running_loop().create_future()


async def test_a_close_that_is_cancelled_ends_what_waits_for_others(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks, asyncio.timeout(10):
        here, there = ranks.systems
        await there.spawn(Plain, name="other")
        await here.spawn(Slow)
        asking = asyncio.ensure_future(here.ref("other", rank=1).wait())
        await turns(3)
        closing = asyncio.ensure_future(here.close())
        await turns(3)
        closing.cancel()
        with pytest.raises(PeerLost, match="this node is closed"):
            await asking
        here._roster.cells["Slow-1"].kill()
        await here._roster.cells["Slow-1"].wait_ended()
