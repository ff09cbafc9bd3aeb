"""Events of the same turn, or in the other order, neither hang nor lose anything."""

from __future__ import annotations

import asyncio
import sys
from typing import ClassVar

import pytest

from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.actors.runtime.dead_letters import DeadLetter
from asyncpar.actors.runtime.declaration import MailboxPolicy
from asyncpar.actors.runtime.mailbox import BURST
from asyncpar.actors.runtime.window import OVERHEAD, WINDOW, OutboundMessage, SendWindow
from asyncpar.errors import PeerLost
from tests.actors.runtime.conftest import OpenRanks
from tests.actors.runtime.plain_actors import Plain, turns

MEBIBYTE = 1 << 20


# -- names -------------------------------------------------------------------------------------------------------------


async def test_a_name_of_its_own_is_none_that_another_actor_was_given(open_ranks: OpenRanks) -> None:
    async with open_ranks(1) as ranks, asyncio.timeout(30):
        (system,) = ranks.systems
        given = await system.spawn(Plain, name="Plain-1")
        own = [await system.spawn(Plain), await system.spawn(Plain)]
        names = [await ref.name_of() for ref in (given, *own)]
        assert len(set(names)) == 3


# -- the event loop ----------------------------------------------------------------------------------------------------


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
    async with open_ranks(1) as ranks, asyncio.timeout(30):
        ref = await ranks.systems[0].spawn(Again)
        ref.beside.tell()
        await turns(3)
        assert await ref.enough() > 0


def test_dropping_many_queued_messages_takes_no_quadratic_time() -> None:
    window = SendWindow()
    window.put(OutboundMessage(memoryview(bytes(WINDOW))))
    messages = [OutboundMessage(memoryview(b"")) for _ in range(100_000)]  # minutes, if each looks at all others
    for outgoing in messages:
        window.put(outgoing)
    for outgoing in reversed(messages):
        assert window.drop(outgoing)
    window.credit(WINDOW + OVERHEAD)
    assert window.next() is None
    assert window.is_idle


# -- credit ------------------------------------------------------------------------------------------------------------


class Latest(Actor):
    mailbox: ClassVar[MailboxPolicy] = MailboxPolicy(limit=2, when_full="drop_oldest")

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
    async with open_ranks(1) as ranks, asyncio.timeout(30):
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
        frame, depth = sys._getframe(), 0  # noqa: SLF001  # documented in the library reference; counts the frames of the stack
        while (back := frame.f_back) is not None:
            frame, depth = back, depth + 1
        depths.append(depth)

    async with open_ranks(1) as ranks, asyncio.timeout(30):
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


async def test_an_observer_of_dead_letters_that_tells_again_does_not_observe_itself(open_ranks: OpenRanks) -> None:
    async with open_ranks(1) as ranks:
        (system,) = ranks.systems
        nobody = system.ref("nobody")
        received: list[DeadLetter] = []

        def tell_again(letter: DeadLetter) -> None:
            received.append(letter)
            nobody.note.tell("again")

        system.dead_letters.subscribe(tell_again)
        for _ in range(2):
            nobody.note.tell("once")
        assert (len(received), system.dead_letters.count) == (2, 4)
        assert not system._caller._windows, "credit was lost"  # noqa: SLF001  # credit that was never returned shows nowhere until it is used up


# -- requests ----------------------------------------------------------------------------------------------------------


async def test_a_remote_spawn_that_is_cancelled_at_any_step_leaves_nobody_behind(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks, asyncio.timeout(30):
        here, there = ranks.systems
        for steps in range(30):
            spawning = asyncio.ensure_future(here.spawn_on(1, Plain, name=f"child {steps}"))
            await turns(steps)
            was_done = spawning.done()
            spawning.cancel()
            await asyncio.wait({spawning})
            for _ in range(200):
                await asyncio.sleep(0)
            is_there = f"child {steps}" in there._registry.cells  # noqa: SLF001  # asking for the actor would spawn or wait; whether its cell exists at this turn shows nowhere else
            assert is_there == was_done, f"cancelled after {steps} turns"


class Slow(Plain):
    async def on_stop(self) -> None:
        await asyncio.get_running_loop().create_future()


async def test_a_close_that_is_cancelled_ends_what_waits_for_others(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks, asyncio.timeout(30):
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
        here._registry.cells["Slow-1"].kill()  # noqa: SLF001  # ends the actor that the cancelled close has left behind, in the registry of the system that was closed
        await here._registry.cells["Slow-1"].wait_ended()  # noqa: SLF001  # ends the actor that the cancelled close has left behind, in the registry of the system that was closed
