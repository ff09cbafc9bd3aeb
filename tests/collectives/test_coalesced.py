"""all_reduce_many is one operation: numbered, described, cancelled and bounded like any other."""

from __future__ import annotations

import asyncio
import tracemalloc

import numpy as np
import pytest

from asyncpar.collectives.arrays import Array
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import OperationMismatch, PeerCancelled, UsageError
from asyncpar.testing import local_world
from tests.collective_engines import engine_of
from tests.collectives.conftest import OpenRanks


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def mixed() -> list[Array]:
    return [np.ones(3), np.ones(2, np.int32), np.ones(4, np.float32), np.ones(5)]


async def test_a_call_takes_one_number_whatever_the_dtypes(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        await asyncio.gather(*(c.all_reduce_many(mixed()) for c in ranks.communicators))
        call = ranks.communicators[0].all_reduce_many(mixed())
        assert engine_of(ranks.communicators[0]).ledger.last == 2
        await asyncio.gather(call, ranks.communicators[1].all_reduce_many(mixed()))
        (statistics,) = ranks.communicators[0].traffic.operations
        assert (statistics.operation, statistics.calls) == ("all_reduce_many", 2)


async def test_in_the_arena_each_rank_may_await_calls_in_an_order_of_its_own() -> None:
    async with local_world(3, transport="shm") as nodes, asyncio.timeout(30):

        async def run(communicator: Communicator) -> list[float]:
            calls = [communicator.all_reduce_many([np.full(50_000, float(number))]) for number in range(6)]
            order = [(number * 5 + communicator.rank) % 6 for number in range(6)]
            results = {number: await calls[number] for number in order}
            return [float(results[number][0][-1]) for number in range(6)]

        assert await asyncio.gather(*(run(node.world) for node in nodes)) == [[3.0 * n for n in range(6)]] * 3


@pytest.mark.parametrize("transport", ["inproc", "shm"])
@pytest.mark.parametrize("count", [1, 400_000])
async def test_cancelling_on_one_rank_ends_it_on_all_and_leaves_the_group_usable(transport: str, count: int) -> None:
    async with local_world(3, transport=transport) as nodes, asyncio.timeout(30):
        for _ in range(3):
            calls = [node.world.all_reduce_many([np.ones(count), np.ones(3, np.int8)]) for node in nodes[:2]]
            first, second = map(asyncio.ensure_future, calls)
            await settle()
            first.cancel()
            await settle()
            late = nodes[2].world.all_reduce_many([np.ones(count), np.ones(3, np.int8)])
            assert first.cancelled()
            for outcome in await asyncio.gather(second, late, return_exceptions=True):
                assert isinstance(outcome, PeerCancelled)
                assert outcome.rank == 0
            results = await asyncio.gather(*(node.world.all_reduce_many([np.ones(2)]) for node in nodes))
            assert [float(arrays[0][0]) for arrays in results] == [3.0] * 3


async def test_many_arrays_are_distinguished_by_a_digest_and_the_first_are_named(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        lengths = [[2] * 9, [2] * 8 + [3]]
        calls = (
            communicator.all_reduce_many([np.zeros(length) for length in lengths[communicator.rank]])
            for communicator in ranks.communicators
        )
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, OperationMismatch)
            assert str(error).count("float64[2], float64[2], float64[2], float64[2], ... 9 arrays, ") == 2


async def test_a_reduction_that_a_dtype_lacks_is_refused_also_for_empty_arrays() -> None:
    async with local_world(1) as (node,):
        for arrays in ([np.zeros(2), np.zeros(2, int)], [np.zeros(0, int)]):
            with pytest.raises(UsageError, match="mean needs a floating dtype"):
                await node.world.all_reduce_many(arrays, "mean")
        with pytest.raises(UsageError, match="op: expected one of"):
            await node.world.all_reduce_many([], "average")  # type: ignore[call-overload]
        assert await node.world.all_reduce_many([], "mean") == []


async def test_by_messages_it_needs_a_few_pieces_of_memory_besides(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        bundles = [[np.ones(500_000) for _ in range(20)] for _ in range(2)]
        tracemalloc.start()
        try:
            await asyncio.gather(*(c.all_reduce_many(bundles[c.rank]) for c in ranks.communicators))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 2 * 24 << 20, "80 MB are reduced on each of two ranks"
        assert all((array == 2).all() for bundle in bundles for array in bundle)
