"""Nothing that is there at the end of an actor, a watch, or a rank is lost or kept."""

from __future__ import annotations

import asyncio
import gc
import logging
import traceback
import weakref

import pytest

from asyncpar.actors.runtime import message
from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.actors.runtime.calls import Delivery, time_left
from asyncpar.actors.runtime.ending import Down, DownReason
from asyncpar.actors.runtime.mailbox import BURST
from asyncpar.actors.runtime.watches import Watch
from asyncpar.errors import ActorDown, PeerLost, ProtocolError
from tests.actors.runtime.conftest import OpenRanks
from tests.actors.runtime.plain_actors import Careless, Plain, turns

MEBIBYTE = 1 << 20


# -- ends --------------------------------------------------------------------------------------------------------------


class Bereaved(Actor):
    """Its hook takes for ever."""

    def __init__(self) -> None:
        self.count = 0

    @endpoint
    async def nothing(self) -> None:
        pass

    async def on_down(self, down: Down) -> None:
        self.count += 1
        await asyncio.get_running_loop().create_future()

    @endpoint
    async def follow(self, other: Plain) -> None:
        self.watch(other)


async def test_no_hook_begins_after_a_kill(open_ranks: OpenRanks) -> None:
    async with open_ranks(1) as ranks, asyncio.timeout(30):
        (system,) = ranks.systems
        ref, other = await system.spawn(Bereaved), await system.spawn(Plain)
        await ref.follow(other)
        cell = system._registry.cells["Bereaved-1"]  # noqa: SLF001  # what an actor's cell keeps shows nowhere but in memory
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
    async with open_ranks(1) as ranks, asyncio.timeout(30):
        (system,) = ranks.systems
        await system.stop(await system.spawn(LateParent))
        with pytest.raises(ActorDown):
            await system.ref("born in on_stop").name_of()


async def test_an_actor_that_has_ended_has_no_more_children(open_ranks: OpenRanks) -> None:
    async with open_ranks(1) as ranks, asyncio.timeout(30):
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


@pytest.mark.promise("failure-log")
async def test_no_failure_of_a_child_is_lost_when_its_owner_fails_with_another_one(
    open_ranks: OpenRanks, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_ranks(1) as ranks, asyncio.timeout(30):
        (system,) = ranks.systems
        ref = await system.spawn(Family, name="family")
        watch = system.watch(ref)
        await ref.fail_both()
        assert (await watch).reason is DownReason.FAILED
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert [text.split(" failed")[0] for text in errors] == ["rank 0: actor 'family'", "rank 0: actor 'second'"]


@pytest.mark.promise("failure-log")
async def test_what_on_stop_raises_is_logged_if_nobody_waits_for_it(
    open_ranks: OpenRanks, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_ranks(1) as ranks, asyncio.timeout(30):
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


# -- watches -----------------------------------------------------------------------------------------------------------


async def _wait_for(watch: Watch) -> Down:
    return await watch


async def test_awaiting_a_watch_that_was_cancelled_raises_at_once(open_ranks: OpenRanks) -> None:
    async with open_ranks(1) as ranks, asyncio.timeout(30):
        (system,) = ranks.systems
        watch = system.watch(await system.spawn(Plain))
        watch.cancel()
        waiting = asyncio.ensure_future(_wait_for(watch))
        await turns(2)
        assert waiting.cancelled()


async def test_a_callback_of_an_end_may_cancel_other_watches_of_the_same_actor(open_ranks: OpenRanks) -> None:
    async with open_ranks(1) as ranks, asyncio.timeout(30):
        (system,) = ranks.systems
        ref = await system.spawn(Plain)
        received: list[Down] = []
        watches: list[Watch] = []

        def receive(down: Down) -> None:
            received.append(down)
            for watch in watches:
                watch.cancel()

        watches += [system.watch(ref, receive) for _ in range(3)]
        await system.stop(ref)
        assert len(received) == 1


async def test_an_actor_that_has_ended_watches_nobody(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks, asyncio.timeout(30):
        here, there = ranks.systems
        other = await there.spawn(Plain, name="other")
        ref = await here.spawn(Bereaved)
        await ref.follow(other)
        cell = weakref.ref(here._registry.cells["Bereaved-1"])  # noqa: SLF001  # what an actor's cell keeps shows nowhere but in memory
        await here.stop(ref)
        await here.ref("other", rank=1).note("the unwatch has arrived before this")
        assert len(here._watches) == 0  # noqa: SLF001  # a watch left behind shows nowhere else
        assert not there._registry.cells["other"].watchers  # noqa: SLF001  # what an actor's cell keeps shows nowhere but in memory
        del ref
        gc.collect()
        assert cell() is None


async def test_a_watch_ends_with_its_rank_if_that_gave_no_reason_that_is_known(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks, asyncio.timeout(30):
        here, there = ranks.systems
        await there.spawn(Plain, name="other")
        watch = here.watch(here.ref("other", rank=1))
        await turns(20)
        with pytest.raises(ProtocolError, match="'vanished' is no reason"):
            here._watches.downed(1, message.Downed(0, "vanished"))  # noqa: SLF001  # a message that no rank of this program sends is handed over in place of its transport
        ranks.kill(1)
        async with asyncio.timeout(2):
            assert (await watch).reason is DownReason.LOST


async def test_a_watch_that_begins_after_the_end_of_its_node_ends_at_once(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks, asyncio.timeout(30):
        here, there = ranks.systems
        await there.spawn(Plain, name="other")
        await here.close()
        watch = here._watches.begin(here.ref("other", rank=1))  # noqa: SLF001  # the public watch() refuses a closed system before it comes to this
        assert watch.down is not None
        assert watch.down.reason is DownReason.CLOSED


# -- what is kept ------------------------------------------------------------------------------------------------------


class Nurse(Plain):
    """Starts a child in an endpoint."""

    @endpoint
    async def load(self, block: bytes) -> None:
        await self.spawn(Plain, name="baby")


class Clock(Actor):
    """Notes how much time its hook has for a call."""

    def __init__(self) -> None:
        self.left: float | None = -1.0
        self.is_notified = asyncio.Event()

    @endpoint
    async def follow(self, other: Plain) -> None:
        self.watch(other)

    async def on_down(self, down: Down) -> None:
        self.left = time_left()
        self.is_notified.set()

    @endpoint(concurrency=1)
    async def seen(self) -> float | None:
        await self.is_notified.wait()
        return self.left


class ClockOwner(Plain):
    @endpoint
    async def hold(self) -> None:
        self.clock = await self.spawn(Clock, name="clock")
        await self.gate.wait()


async def test_the_message_whose_endpoint_started_an_actor_is_not_kept_as_long_as_that_lives(
    open_ranks: OpenRanks,
) -> None:
    async with open_ranks(1) as ranks, asyncio.timeout(30):
        ref = await ranks.systems[0].spawn(Nurse)
        await ref.load(bytes(MEBIBYTE))
        gc.collect()
        kept = [each for each in gc.get_objects() if type(each) is Delivery and len(each.payload) >= MEBIBYTE]
        assert kept == []


async def test_a_hook_has_no_deadline_of_the_call_in_which_its_actor_was_started(open_ranks: OpenRanks) -> None:
    async with open_ranks(1) as ranks, asyncio.timeout(30):
        (system,) = ranks.systems
        owner, other = await system.spawn(ClockOwner), await system.spawn(Plain)
        async with asyncio.timeout(30):
            holding = asyncio.ensure_future(_hold(owner))
            await asyncio.sleep(0.1)  # until the deadline has been found and travelled
            clock = system.ref("clock", actor_class=Clock)
            await clock.follow(other)
            await system.stop(other)
            assert await clock.seen() is None
        await owner.open()
        await holding


async def _hold(owner: ClockOwner) -> None:
    async with asyncio.timeout(30):
        await owner.hold()


async def test_errors_of_a_lost_rank_hold_no_more_of_the_past_with_each_message(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks, asyncio.timeout(30):
        here, there = ranks.systems
        await there.spawn(Plain, name="other")
        ref = here.ref("other", rank=1, actor_class=Plain)
        await ref.note("the link is open")
        ranks.kill(1)
        await turns(20)
        for _ in range(20):
            with pytest.raises(PeerLost):
                ref.note.tell("x")
        assert len(traceback.extract_tb(here._links.lost[1].__traceback__)) < 20  # noqa: SLF001  # the error that the links keep and raise again: how long its traceback grows shows there alone
