"""Ranks of one host agree on operations in the memory that they share: as those do that send messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar, cast

import numpy as np
import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import OperationMismatch, PeerCancelled
from tests.collectives.sampled_sizes import InSharedWorlds, shared_worlds  # noqa: F401  # a fixture
from tests.device.device_worlds import OnDevices, device_world
from tests.device.fake_devices import FakeCluster, FakeDeviceArray
from tests.soak import chosen


class TestOnDevicesOfOneHost(InSharedWorlds):
    out_of = 1
    sizes: ClassVar[Sequence[int]] = (3,)

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        cluster = FakeCluster(seed=size)
        async with device_world(size, cluster=cluster, transport="shm") as nodes:
            yield [cast(Communicator, OnDevices(node.world, cluster)) for node in nodes]


def sent(comm: Any) -> int:
    """Return how many messages the operations of ``comm`` have sent."""
    return sum(operation.messages for operation in comm.traffic.operations)


def ones(cluster: FakeCluster, count: int = 4) -> Any:
    return FakeDeviceArray.of(cluster, np.ones(count, np.float32))


async def test_the_records_go_through_shared_memory() -> None:
    cluster = FakeCluster()
    async with device_world(2, cluster=cluster, transport="shm") as nodes:
        comms: list[Any] = [node.world for node in nodes]
        await asyncio.gather(*(comm.all_reduce(ones(cluster)) for comm in comms))
        messages = [sent(comm) for comm in comms]
        for _ in range(3):
            await asyncio.gather(*(comm.all_reduce(ones(cluster)) for comm in comms))
        assert [sent(comm) for comm in comms] == messages


@pytest.mark.parametrize("turns", chosen([0, 1, 2, 4, 7, 10, 25], soak=[*range(10), 15, 25, 50]))
async def test_a_call_that_is_cancelled_at_any_point_ends_on_all_ranks_and_the_group_goes_on(turns: int) -> None:
    cluster = FakeCluster(seed=turns)
    async with device_world(3, cluster=cluster, transport="shm") as nodes:
        comms: list[Any] = [node.world for node in nodes]
        if turns % 2:
            await asyncio.gather(*(comm.all_reduce(ones(cluster)) for comm in comms))
        tasks = [asyncio.ensure_future(comm.all_reduce(ones(cluster, 1000))) for comm in comms]
        for _ in range(turns):
            await asyncio.sleep(0)
        tasks[1].cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, BaseException):
                assert isinstance(outcome, PeerCancelled | asyncio.CancelledError), outcome
                assert isinstance(outcome, asyncio.CancelledError) or outcome.rank == 1
            else:
                np.testing.assert_array_equal(outcome.get(), 3.0)
        for _ in range(2):
            found = await asyncio.gather(*(comm.all_reduce(ones(cluster)) for comm in comms))
            np.testing.assert_array_equal(found[0].get(), 3.0)


async def test_a_root_that_does_not_need_a_cancelled_rank_goes_on_with_it() -> None:
    """The root of a broadcast may be through when another rank is cancelled, which never launches it."""
    for turns in range(0, 14, chosen(3, soak=1)):
        cluster = FakeCluster(seed=turns)
        async with device_world(2, cluster=cluster) as nodes:
            comms: list[Any] = [node.world for node in nodes]
            await asyncio.gather(*(comm.all_reduce(ones(cluster)) for comm in comms))
            tasks = [asyncio.ensure_future(comm.broadcast(ones(cluster))) for comm in comms]
            for _ in range(turns):
                await asyncio.sleep(0)
            tasks[1].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            async with asyncio.timeout(30):
                await asyncio.gather(*(comm.all_reduce(ones(cluster)) for comm in comms))


async def test_calls_are_launched_in_the_order_of_calls_in_whatever_order_they_are_awaited() -> None:
    cluster = FakeCluster(seed=9)
    async with device_world(2, cluster=cluster, transport="shm") as nodes:
        comms: list[Any] = [node.world for node in nodes]
        calls = [[comm.all_reduce(ones(cluster)) for _ in range(4)] for comm in comms]

        async def backwards(order: list[Any]) -> None:
            for call in reversed(order):
                np.testing.assert_array_equal((await call).get(), 2.0)

        async with asyncio.timeout(30):
            await asyncio.gather(backwards(calls[0]), asyncio.gather(*calls[1]))


async def test_a_call_that_an_awaited_one_has_begun_is_cancelled_like_others() -> None:
    cluster = FakeCluster(seed=9)
    async with device_world(2, cluster=cluster, transport="shm") as nodes:
        comms: list[Any] = [node.world for node in nodes]
        first, second = comms[0].all_reduce(ones(cluster)), comms[0].all_reduce(ones(cluster))
        waiting = asyncio.ensure_future(second)
        await asyncio.sleep(0.05)
        first.close()
        ended = await asyncio.gather(
            waiting, *(comms[1].all_reduce(ones(cluster)) for _ in range(2)), return_exceptions=True
        )
        assert isinstance(ended[1], PeerCancelled)
        async with asyncio.timeout(30):
            await asyncio.gather(*(comm.all_reduce(ones(cluster)) for comm in comms))


async def test_ranks_that_differ_are_notified_at_once() -> None:
    cluster = FakeCluster()
    async with device_world(2, cluster=cluster, transport="shm") as nodes:
        comms: list[Any] = [node.world for node in nodes]
        for other in (ones(cluster, 5), np.ones(4, np.float32)):
            call = comms[0].all_reduce(ones(cluster))
            async with asyncio.timeout(30):
                for error in await asyncio.gather(call, comms[1].all_reduce(other), return_exceptions=True):
                    assert isinstance(error, OperationMismatch)
        await asyncio.gather(*(comm.all_reduce(ones(cluster)) for comm in comms))
