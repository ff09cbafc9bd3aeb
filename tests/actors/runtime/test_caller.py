"""Cancelled asks, lost peers, and senders that are faster than their receivers."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.actors.runtime.window import WINDOW
from asyncpar.errors import PeerLost, UsageError

MEBIBYTE = np.zeros(1 << 20, np.uint8)


class Gate(Actor):
    """Waits on request, and lets tests see it."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.opened = asyncio.Event()
        self.log: list[object] = []

    @endpoint
    async def wait(self) -> str:
        self.entered.set()
        try:
            await self.opened.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return "opened"

    @endpoint
    async def refuse_to_be_cancelled(self) -> str:
        try:
            return await self.wait()
        except asyncio.CancelledError:
            return "still here"

    @endpoint
    async def forward(self, target: Gate) -> str:
        self.entered.set()
        return await target.wait()

    @endpoint
    async def note(self, item: int) -> None:
        self.log.append(item)

    @endpoint
    async def swallow(self, array: np.ndarray) -> int:
        self.log.append(array.size)
        return len(self.log)

    @endpoint
    async def noted(self) -> list[Any]:
        return self.log


async def spawn_gate(system: Any, name: str = "gate") -> Gate:
    """Spawn a gate and return the actor itself, which lives in this process."""
    gates: list[Gate] = []

    class Seen(Gate):
        async def on_start(self) -> None:
            gates.append(self)

    await system.spawn(Seen, name=name)
    return gates[0]


@pytest.fixture(params=[0, 1], ids=["same rank", "other rank"])
def home(request: pytest.FixtureRequest) -> int:
    """The rank of the actor; its caller is rank 0."""
    rank: int = request.param
    return rank


# -- cancellation ------------------------------------------------------------------------------------------------------


@pytest.mark.promise("cancel-remote")
async def test_cancelling_an_ask_cancels_the_endpoint_and_the_actor_goes_on(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        gate = await spawn_gate(ranks.systems[home])
        ref = ranks.systems[0].ref("gate", rank=home)
        ask = asyncio.create_task(ref.wait())
        await gate.entered.wait()
        ask.cancel()
        await asyncio.wait({ask})
        assert ask.cancelled()
        await gate.cancelled.wait()
        gate.opened.set()
        assert await ref.wait() == "opened"


async def test_a_deadline_ends_an_ask_that_nobody_answers(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        gate = await spawn_gate(ranks.systems[home])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await ranks.systems[0].ref("gate", rank=home).wait()
        await ranks.systems[0].ref("gate", rank=home).note(1)
        assert gate.log == [1]


@pytest.mark.promise("cancel-remote")
async def test_cancelling_a_call_in_the_mailbox_means_it_is_never_begun(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        gate = await spawn_gate(ranks.systems[home])
        ref = ranks.systems[0].ref("gate", rank=home)
        first = asyncio.create_task(ref.wait())
        await gate.entered.wait()
        second = asyncio.create_task(ref.note(2))
        third = asyncio.create_task(ref.note(3))
        await asyncio.sleep(0)
        second.cancel()
        gate.opened.set()
        await asyncio.gather(first, third)
        assert second.cancelled()
        assert gate.log == [3]


@pytest.mark.promise("cancel-local")
async def test_an_endpoint_that_does_not_obey_a_cancellation_harms_nobody(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        gate = await spawn_gate(ranks.systems[home])
        ref = ranks.systems[0].ref("gate", rank=home)
        ask = asyncio.create_task(ref.refuse_to_be_cancelled())
        await gate.entered.wait()
        ask.cancel()
        await asyncio.wait({ask})
        assert ask.cancelled()
        await ref.note(1)
        assert await ref.noted() == [1]


async def test_a_cancellation_travels_along_a_chain_of_asks(open_ranks: Any) -> None:
    async with open_ranks(3) as ranks:
        last = await spawn_gate(ranks.systems[2])
        await spawn_gate(ranks.systems[1])
        ask = asyncio.create_task(ranks.systems[0].ref("gate", rank=1).forward(ranks.systems[0].ref("gate", rank=2)))
        await last.entered.wait()
        ask.cancel()
        await last.cancelled.wait()
        await asyncio.wait({ask})
        assert ask.cancelled()


# -- loss --------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("lost")
async def test_a_killed_rank_ends_the_asks_that_wait_for_it(open_ranks: Any) -> None:
    async with open_ranks(3) as ranks:
        gate = await spawn_gate(ranks.systems[1])
        ref = ranks.systems[0].ref("gate", rank=1)
        asks = [asyncio.create_task(ref.wait()) for _ in range(20)]
        await gate.entered.wait()
        ranks.kill(1)
        for ask in asks:
            with pytest.raises(PeerLost, match=r"gate' on rank 1>: rank 1 on .* is lost: killed") as lost:
                await ask
            assert (lost.value.rank, lost.value.operation) == (1, "wait of <actor 'gate' on rank 1>")
        assert ranks.systems[0].pending == 0


async def test_calls_to_a_rank_that_is_gone_fail_at_once(open_ranks: Any) -> None:
    async with open_ranks(3) as ranks:
        await spawn_gate(ranks.systems[1])
        ref = ranks.systems[0].ref("gate", rank=1)
        await ref.note(1)
        ranks.kill(1)
        with pytest.raises(PeerLost, match=r"note of <actor 'gate' on rank 1>: rank 1 .* is lost"):
            await ref.note(2)
        with pytest.raises(PeerLost, match="note of"):
            ref.note.tell(3)


async def test_a_rank_that_cannot_be_reached_is_lost(open_ranks: Any) -> None:
    async with open_ranks(2) as ranks:
        ranks.fabric.leave(1)
        told = ranks.systems[0].ref("gate", rank=1).note.tell(1)
        with pytest.raises(PeerLost, match="rank 1 on localhost is lost"):
            await ranks.systems[0].ref("gate", rank=1).note(2)
        await told  # it had left; the fate of a told message is not known here


async def test_the_calls_of_a_lost_rank_are_cancelled_and_its_tells_are_done(open_ranks: Any) -> None:
    async with open_ranks(3) as ranks:
        gate = await spawn_gate(ranks.systems[1])
        ask = asyncio.create_task(ranks.systems[0].ref("gate", rank=1).wait())
        await gate.entered.wait()
        ranks.systems[0].ref("gate", rank=1).note.tell(7)
        ranks.kill(0)
        await gate.cancelled.wait()
        assert await ranks.systems[2].ref("gate", rank=1).noted() == [7]
        with pytest.raises(PeerLost):
            await ask


async def test_a_rank_that_leaves_in_good_order_ends_the_asks_that_wait_for_it(open_ranks: Any) -> None:
    async with open_ranks(2) as ranks:
        gate = await spawn_gate(ranks.systems[1])
        asks = [asyncio.create_task(ranks.systems[0].ref("gate", rank=1).wait()) for _ in range(3)]
        await gate.entered.wait()
        await ranks.systems[1].close()
        await ranks.links[1].close()
        for outcome in await asyncio.gather(*asks, return_exceptions=True):
            assert isinstance(outcome, PeerLost)
            assert "the node was closed" in str(outcome)
        with pytest.raises(PeerLost, match="it left the world"):
            await ranks.systems[0].ref("gate", rank=1).wait()


# -- fast senders ------------------------------------------------------------------------------------------------------


@pytest.mark.promise("mailbox-wait", "tell")
async def test_a_slow_actor_slows_down_those_who_await_their_tells(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        gate = await spawn_gate(ranks.systems[home])
        ref = ranks.systems[0].ref("gate", rank=home)
        ref.wait.tell()
        await gate.entered.wait()
        tells = [ref.swallow.tell(MEBIBYTE) for _ in range(40)]
        await asyncio.gather(*tells[: WINDOW // MEBIBYTE.size - 1])
        last = asyncio.ensure_future(wait_for(tells[-1]))
        await asyncio.sleep(0)
        assert not last.done()
        gate.opened.set()
        await last
        assert await ref.swallow(MEBIBYTE) == 41
        assert gate.log == [MEBIBYTE.size] * 41


async def wait_for(told: Any) -> None:
    await told


async def test_an_actor_that_waits_for_an_answer_gets_it_though_its_mailbox_is_flooded(open_ranks: Any) -> None:
    async with open_ranks(2) as ranks:
        busy, other = await spawn_gate(ranks.systems[0]), await spawn_gate(ranks.systems[1])
        waiting = asyncio.create_task(ranks.systems[0].ref("gate").forward(ranks.systems[0].ref("gate", rank=1)))
        await other.entered.wait()
        flood = [ranks.systems[1].ref("gate", rank=0).swallow.tell(MEBIBYTE) for _ in range(100)]
        other.opened.set()
        assert await waiting == "opened"
        await flood[-1]
        assert await ranks.systems[1].ref("gate", rank=0).swallow(MEBIBYTE) == 101
        assert len(busy.log) == 101


async def test_an_actor_with_a_full_mailbox_does_not_hold_up_its_neighbours(open_ranks: Any) -> None:
    async with open_ranks(2) as ranks:
        gate = await spawn_gate(ranks.systems[1])
        await spawn_gate(ranks.systems[1], "neighbour")
        ranks.systems[0].ref("gate", rank=1).wait.tell()
        tells = [ranks.systems[0].ref("gate", rank=1).swallow.tell(MEBIBYTE) for _ in range(40)]
        assert await ranks.systems[0].ref("neighbour", rank=1).swallow(MEBIBYTE) == 1
        gate.opened.set()
        await tells[-1]


async def test_cancelling_an_ask_that_has_not_left_means_it_never_does(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        gate = await spawn_gate(ranks.systems[home])
        ref = ranks.systems[0].ref("gate", rank=home)
        ref.wait.tell()
        await gate.entered.wait()
        for _ in range(20):
            ref.swallow.tell(MEBIBYTE)
        queued = asyncio.create_task(ref.note(5))
        await asyncio.sleep(0)
        queued.cancel()
        await asyncio.wait({queued})
        gate.opened.set()
        assert await ref.noted() == [MEBIBYTE.size] * 20


async def test_a_tell_that_never_left_raises_when_its_rank_is_lost(open_ranks: Any) -> None:
    async with open_ranks(2) as ranks:
        gate = await spawn_gate(ranks.systems[1])
        ref = ranks.systems[0].ref("gate", rank=1)
        ref.wait.tell()
        tells = [ref.swallow.tell(MEBIBYTE) for _ in range(20)]
        await gate.entered.wait()
        waiting = asyncio.ensure_future(wait_for(tells[-1]))
        await asyncio.sleep(0)
        ranks.kill(1)
        for told in (waiting, tells[-2]):
            with pytest.raises(PeerLost, match="killed"):
                await told
        gate.opened.set()


async def test_a_flood_of_tells_that_nobody_awaits_is_a_usage_error(open_ranks: Any) -> None:
    async with open_ranks(2) as ranks:
        gate = await spawn_gate(ranks.systems[1])
        ref = ranks.systems[0].ref("gate", rank=1)
        await ref.note(0)
        ref.wait.tell()
        huge = np.broadcast_to(MEBIBYTE, (32, MEBIBYTE.size))
        for _ in range(9):  # one is under way, eight are queued
            ref.swallow.tell(huge)
        with pytest.raises(UsageError, match=r"tell swallow of .*: 8 messages .* await the tells"):
            ref.swallow.tell(huge)
        gate.opened.set()
        assert await ref.swallow(MEBIBYTE) == 11


async def test_a_message_that_is_too_large_is_a_usage_error(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        await spawn_gate(ranks.systems[home])
        huge = np.broadcast_to(MEBIBYTE, (1024, MEBIBYTE.size))
        with pytest.raises(UsageError, match="the call of swallow: at most 1073741824 bytes fit into one message"):
            await ranks.systems[0].ref("gate", rank=home).swallow(huge)
