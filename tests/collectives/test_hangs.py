"""Ways in which somebody once waited for ever, or got the wrong error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import NodeClosed, OperationMismatch, PeerCancelled, PeerLost, UsageError
from asyncpar.testing import local_world
from tests.collective_engines import engine_of
from tests.collectives.conftest import OpenRanks, Ranks
from tests.products import in_turn


async def connect_all(ranks: Ranks) -> None:
    size = len(ranks.communicators)
    await asyncio.gather(*(c.all_to_all(np.zeros(size), algorithm="pairwise") for c in ranks.communicators))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_task_cancelled_before_its_first_step_is_reported_though_it_is_kept(
    open_ranks: OpenRanks,
) -> None:
    async with open_ranks(2) as ranks:
        task = asyncio.ensure_future(ranks.communicators[0].barrier())
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        async with asyncio.timeout(30):
            with pytest.raises(PeerCancelled, match="rank 0"):
                await ranks.communicators[1].barrier()


async def test_very_many_sends_that_are_given_up_each_fail_one_receive(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        zero, one = ranks.communicators
        receives = [asyncio.ensure_future(one.recv(0)) for _ in range(600)]
        await settle()
        sends = [asyncio.ensure_future(zero.send(np.zeros(3), 1)) for _ in range(600)]
        for send in sends:
            send.cancel()
        async with asyncio.timeout(30):
            outcomes = await asyncio.gather(*receives, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {PeerCancelled}


async def test_an_operation_that_fails_while_it_sends_says_why(open_ranks: OpenRanks) -> None:
    """Its first send is taken back before anybody waits for it: that is no cancellation."""
    async with open_ranks(3) as ranks:
        await connect_all(ranks)
        zero, _, two = ranks.communicators
        other = asyncio.ensure_future(two.scatter(root=0, out=np.zeros(90_000), algorithm="linear"))
        await settle()
        outcomes = await asyncio.gather(
            zero.scatter(np.zeros((3, 100_000)), algorithm="linear"), other, return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [OperationMismatch] * 2


async def test_a_mismatch_with_an_operation_long_past_is_found(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        zero, one = ranks.communicators
        await connect_all(ranks)
        for _ in range(300):
            begun = asyncio.ensure_future(zero.broadcast(np.zeros(1)))
            await asyncio.sleep(0)
            begun.cancel()
            await asyncio.wait({begun})
        await asyncio.sleep(0.1)
        engine_of(one).table.aborted.clear()  # as after thousands of others
        async with asyncio.timeout(30):
            with pytest.raises(
                OperationMismatch,
                match=r"rank 1 calls all_reduce\(float64\[1\], sum\) where rank 0 has called .* operation #2",
            ):
                await one.all_reduce(np.zeros(1))


async def test_a_mismatch_found_by_a_grant_names_both_operations() -> None:
    async with local_world(2, transport="tcp") as nodes:
        zero, one = (node.world for node in nodes)
        await asyncio.gather(zero.barrier(), one.barrier())
        early = asyncio.ensure_future(zero.all_reduce(np.zeros(100_000), algorithm="ring"))
        received = nodes[1].links.bytes_received
        while nodes[1].links.bytes_received == received:  # noqa: ASYNC110 - no event tells of bytes
            await asyncio.sleep(0)  # the grant is on its way
        late = one.all_reduce(np.zeros(200_000), algorithm="ring")
        outcomes = await asyncio.gather(early, late, return_exceptions=True)
        for outcome in outcomes:
            assert isinstance(outcome, OperationMismatch)
            assert "rank 0 calls all_reduce(float64[100000], sum) where rank 1 calls all_reduce(float64[200" in str(
                outcome
            )


async def test_a_keyed_operation_that_a_peer_gave_up_fails_when_it_is_called_late(open_ranks: OpenRanks) -> None:
    async with open_ranks(3) as ranks:
        await connect_all(ranks)
        zero, *others = ranks.communicators
        first = asyncio.ensure_future(zero.all_reduce(np.zeros(100_000), key="layer"))
        await settle()
        first.cancel()
        await asyncio.wait({first})
        for late in others:
            with pytest.raises(PeerCancelled, match="rank 0 cancelled it"):
                await late.all_reduce(np.zeros(100_000), key="layer")
        results = await asyncio.gather(*(c.all_reduce(np.ones(2), key="layer") for c in ranks.communicators))
        assert [float(result[0]) for result in results] == [3.0] * 3


Call = Callable[[Communicator], Coroutine[Any, Any, Any]]
CALLS: tuple[Call, ...] = (
    lambda c: c.all_reduce(np.zeros(10)),
    lambda c: c.all_reduce(np.zeros(100_000), key="k"),
    lambda c: c.all_to_all(np.zeros((3, 50_000)), algorithm="pairwise"),
)


@pytest.mark.parametrize("call", CALLS)
async def test_nothing_is_left_of_operations_that_were_given_up(open_ranks: OpenRanks, call: Call) -> None:
    async with open_ranks(3) as ranks:
        await connect_all(ranks)
        for leaver in (0, 1, 2, 0):
            tasks = [asyncio.ensure_future(call(c)) for c in ranks.communicators]
            for _ in range(leaver):
                await asyncio.sleep(0)
            tasks[leaver].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await settle()
        for links in ranks.links:
            for peer in range(3):
                if peer != links.rank:
                    link = links.link(peer)
                    assert not link._waiting  # noqa: SLF001  # sends left behind show nowhere else
                    assert not link._inbox._posted  # noqa: SLF001  # receives left behind show nowhere else
                    assert not link._inbox._early  # noqa: SLF001  # payloads left behind show nowhere else
                    assert not link._inbox._requested  # noqa: SLF001  # requests left behind show nowhere else
                    assert not link._outbox._grants  # noqa: SLF001  # grants left behind show nowhere else


@pytest.mark.parametrize("is_linked", [True, False])
async def test_a_peer_lost_between_the_call_and_its_await_is_named(open_ranks: OpenRanks, is_linked: bool) -> None:
    async with open_ranks(2) as ranks:
        if is_linked:
            await connect_all(ranks)
        call = ranks.communicators[0].all_reduce(np.zeros(100_000))
        if is_linked:
            ranks.kill(1)
        else:
            ranks.fabric.leave(1)
        async with asyncio.timeout(30):
            with pytest.raises(PeerLost, match=r"rank 0: all_reduce #\d: rank 1"):
                await call


@pytest.mark.parametrize("transport", ["inproc", "shm", "tcp", "grpc"])
async def test_nodes_that_stop_at_the_same_moment_stop_at_once(transport: str) -> None:
    async with local_world(3, transport=transport) as nodes:
        waiting = [asyncio.ensure_future(node.world.all_reduce(np.zeros(1_000_000))) for node in nodes[:2]]
        await settle()
        async with asyncio.timeout(30):
            await asyncio.gather(*(node.stop() for node in nodes))
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {NodeClosed}


@pytest.mark.parametrize(("transport", "count"), in_turn(["tcp", "shm", "grpc"], [25_000, 250]))
async def test_five_hundred_operations_share_one_link(transport: str, count: int) -> None:
    async with local_world(2, transport=transport) as nodes:

        async def reduce_all(communicator: Communicator) -> None:
            arrays = [np.full(count, number + communicator.rank, np.float32) for number in range(500)]
            await asyncio.gather(*(communicator.all_reduce(array) for array in arrays))
            for number, array in enumerate(arrays):
                assert (array == 2 * number + 1).all()

        async with asyncio.timeout(40):
            await asyncio.gather(*(reduce_all(node.world) for node in nodes))


async def test_a_rank_cannot_send_to_itself(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        zero = ranks.communicators[0]
        for call in (lambda: zero.send(np.zeros(1), 0), lambda: zero.recv(0), lambda: zero.send_object(1, 0)):
            with pytest.raises(UsageError, match="expected another rank than this one, got 0"):
                call()
