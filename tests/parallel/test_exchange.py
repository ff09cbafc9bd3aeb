"""The exchange of updates over real worlds: everywhere exactly once, without waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from asyncpar.errors import AsyncparError, PeerCancelled, PeerLost, PeerTimeout, UsageError
from asyncpar.nn import Array, Parameter
from asyncpar.node import Node
from asyncpar.parallel.clock import StalenessClock
from asyncpar.parallel.exchange import UpdateExchange
from asyncpar.parallel.update import AsyncUpdate, UpdateLayout
from asyncpar.testing import run_virtual
from asyncpar.testing.world import local_world
from tests.parallel.replicas import on_all, on_all_failing
from tests.products import sampled

SMALL, LARGE = 7, 100_000


class Rank:
    """An exchange of one parameter, whose updates are whole numbers: sums of them are exact."""

    def __init__(self, node: Node, *, bound: int | None, count: int = SMALL) -> None:
        self.parameter = Parameter("w", np.zeros(count))
        self.layout = UpdateLayout([self.parameter])
        clock = StalenessClock(rank=node.rank, size=node.size, max_staleness=bound)
        group = node.world.subgroup(range(node.size), name="updates")
        assert group is not None
        self.group = group
        self.exchange = UpdateExchange(group, self.layout, clock)

    async def step(self, value: float) -> None:
        """Take in what has arrived, then add ``value`` here and everywhere."""
        await self.exchange.begin_step()
        await self.take()
        update = AsyncUpdate(self.layout)
        update.views()[0][...] = value
        update.apply()
        self.exchange.publish(update)

    async def take(self) -> None:
        arrived = await self.exchange.take_arrived()
        if arrived is not None:
            arrived.apply()

    async def settle(self) -> Array:
        await self.exchange.settle()
        await self.take()
        await self.group.barrier()
        return self.parameter.value.copy()


async def exchange_all(size: int, counts: Sequence[int], *, bound: int | None, count: int, transport: str) -> None:
    """Let each rank make its number of updates, twice; all must end with the sum of all."""

    async def main(node: Node) -> list[Array]:
        rank = Rank(node, bound=bound, count=count)
        await rank.exchange.start()
        ends = []
        for _ in range(2):
            for number in range(counts[node.rank]):
                await rank.step(float(10**node.rank * (number + 1)))
                if number % 3 == node.rank % 3:
                    await asyncio.sleep(0)
            ends.append(await rank.settle())
        await rank.exchange.close(failed=False)
        return ends

    async with local_world(size, transport=transport) as nodes:
        for first, second in await on_all(nodes, main):
            total = sum(10**rank * n * (n + 1) // 2 for rank, n in enumerate(counts))
            np.testing.assert_array_equal(first, float(total))
            np.testing.assert_array_equal(second, float(2 * total))


@pytest.mark.parametrize(("bound", "count", "transport"), sampled([None, 0, 2], [SMALL, LARGE], ["inproc", "shm"]))
async def test_every_update_arrives_everywhere_exactly_once(bound: int | None, count: int, transport: str) -> None:
    await exchange_all(3, (6, 2, 0), bound=bound, count=count, transport=transport)


async def test_a_world_of_one_exchanges_with_nobody() -> None:
    await exchange_all(1, (3,), bound=0, count=SMALL, transport="inproc")


def test_a_slow_rank_gets_what_it_missed_in_few_messages() -> None:
    async def main() -> int:
        async with local_world(2) as nodes:
            ranks = [Rank(node, bound=None, count=LARGE) for node in nodes]
            await ranks[0].exchange.start()
            for _ in range(20):  # rank 1 does not even receive yet
                await ranks[0].step(1.0)
                await asyncio.sleep(1.0)
            await ranks[1].exchange.start()
            await asyncio.gather(*(rank.settle() for rank in ranks))
            np.testing.assert_array_equal(ranks[1].parameter.value, 20.0)
            for rank in ranks:
                await rank.exchange.close(failed=False)
            return ranks[0].group.traffic.payload_bytes

    assert run_virtual(main()) < 4 * 8 * LARGE


def test_waiting_for_a_rank_that_makes_no_progress_times_out_and_names_it() -> None:
    async def main() -> None:
        async with local_world(3) as nodes:
            ranks = [Rank(node, bound=1) for node in nodes]
            for rank in ranks:
                await rank.exchange.start()
                rank.group.timeout = 30.0
            await ranks[2].step(1.0)
            await ranks[0].step(1.0)
            await ranks[0].step(1.0)
            with pytest.raises(
                PeerTimeout, match=r"waited 30\.0 s for an update of rank 1, which is 2 steps behind"
            ) as e:
                await ranks[0].step(1.0)
            assert e.value.rank == 1
            await ranks[1].step(1.0)
            await ranks[0].step(1.0)
            for rank in ranks:
                await rank.exchange.close(failed=False)

    run_virtual(main())


async def test_a_wait_can_be_cut_short_and_repeated() -> None:
    async with local_world(2) as nodes:
        ranks = [Rank(node, bound=0) for node in nodes]
        for rank in ranks:
            await rank.exchange.start()
        await ranks[0].step(1.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await ranks[0].step(1.0)
        await ranks[1].step(1.0)
        await ranks[0].step(1.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await ranks[0].settle()
        with pytest.raises(AsyncparError, match="settle: given up"):
            await ranks[0].step(1.0)
        for rank in ranks:
            await rank.exchange.close(failed=True)


@pytest.mark.parametrize("what", ["step", "settle"])
async def test_a_rank_that_has_failed_ends_the_waiting_of_all_others(what: str) -> None:
    async def main(node: Node) -> None:
        rank = Rank(node, bound=1)
        await rank.exchange.start()
        try:
            await rank.step(1.0)
            if node.rank == 2:
                raise ZeroDivisionError
            if what == "settle":
                await rank.settle()
            while True:
                await rank.step(1.0)
        finally:
            await rank.exchange.close(failed=True)

    async with local_world(3) as nodes:
        *others, culprit = await on_all_failing(nodes, main)
    assert isinstance(culprit, ZeroDivisionError)
    for error in others:
        assert isinstance(error, PeerCancelled)
        assert error.rank is not None


@pytest.mark.parametrize("bound", [None, 1])
async def test_a_rank_that_is_gone_is_peer_lost_on_all_others(bound: int | None) -> None:
    async def main(node: Node) -> None:
        rank = Rank(node, bound=bound)
        await rank.exchange.start()
        try:
            await rank.step(1.0)
            if node.rank == 1:
                await node.stop()
                return
            while True:
                await rank.step(1.0)
                await asyncio.sleep(0)
        finally:
            await rank.exchange.close(failed=False)

    async with local_world(3) as nodes:
        results = await on_all_failing(nodes, main)
    assert results[1] is None
    for error in (results[0], results[2]):
        assert isinstance(error, PeerLost)
        assert error.rank == 1


async def test_an_exchange_that_does_not_run_is_refused() -> None:
    async with local_world(1) as (node,):
        rank = Rank(node, bound=None)
        with pytest.raises(UsageError, match="it is not running"):
            await rank.step(1.0)
        await rank.exchange.close(failed=False)
