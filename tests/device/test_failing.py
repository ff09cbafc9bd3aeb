"""Operations on devices that fail: cancelled, without a rank, or refused by NCCL: errors name ranks, nothing leaks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

from asyncpar.device.fabric import DeviceError, NcclResult
from asyncpar.errors import OperationMismatch, PeerCancelled, PeerLost, PeerTimeout, UsageError, WorldRevoked
from asyncpar.node import Node
from tests.device.device_worlds import device_world
from tests.device.fake_devices import FakeCluster, FakeDeviceArray
from tests.device.fake_fabric import FakeFabric
from tests.products import in_turn
from tests.soak import chosen

Nodes = tuple[Node, ...]


class Ranks:
    """The ranks of a world with devices, and arrays on them."""

    def __init__(self, nodes: Nodes, cluster: FakeCluster) -> None:
        self.comms: list[Any] = [node.world for node in nodes]
        self.cluster = cluster

    def array(self, value: float, count: int = 4) -> FakeDeviceArray:
        return FakeDeviceArray.of(self.cluster, np.full(count, value, np.float32))

    async def work(self, comms: list[Any] | None = None) -> None:
        """Check that the group works."""
        comms = comms or self.comms
        found = await asyncio.gather(*(comm.all_reduce(self.array(1.0)) for comm in comms))
        for result in found:
            np.testing.assert_array_equal(result.get(), float(len(comms)))


async def outcomes(*calls: Coroutine[Any, Any, Any]) -> list[Any]:
    return list(await asyncio.gather(*calls, return_exceptions=True))


def fake_comm(fabric: FakeFabric) -> Any:
    return next(iter(fabric.cluster_communicators))


@pytest.mark.parametrize("turns", [*range(0, 12, chosen(2, soak=1)), 20, 80])
async def test_a_call_that_is_cancelled_at_any_point_ends_on_all_ranks_and_the_group_goes_on(turns: int) -> None:
    cluster = FakeCluster(seed=turns)
    async with device_world(3, cluster=cluster) as nodes:
        ranks = Ranks(nodes, cluster)
        if turns % 2:
            await ranks.work()
        tasks = [asyncio.ensure_future(comm.all_reduce(ranks.array(1.0, 1000))) for comm in ranks.comms]
        for _ in range(turns):
            await asyncio.sleep(0)
        tasks[1].cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in ended:
            if isinstance(outcome, BaseException):
                assert isinstance(outcome, PeerCancelled | asyncio.CancelledError), outcome
                assert isinstance(outcome, asyncio.CancelledError) or outcome.rank == 1
            else:
                np.testing.assert_array_equal(outcome.get(), 3.0)
        for _ in range(2):
            await ranks.work()


async def test_operations_in_flight_end_with_the_one_that_is_cancelled_and_name_its_rank() -> None:
    cluster = FakeCluster(seed=3, longest_delay=2000)
    async with device_world(2, cluster=cluster) as nodes:
        ranks = Ranks(nodes, cluster)
        calls = [[asyncio.ensure_future(comm.all_reduce(ranks.array(1.0))) for _ in range(3)] for comm in ranks.comms]
        await asyncio.sleep(0.05)
        calls[0][1].cancel()
        ended = await asyncio.gather(*(task for tasks in calls for task in tasks), return_exceptions=True)
        assert all(isinstance(outcome, PeerCancelled | asyncio.CancelledError) for outcome in ended)
        cluster.longest_delay = 2
        await ranks.work()


async def test_other_groups_go_on_when_one_is_broken() -> None:
    cluster = FakeCluster(seed=4)
    async with device_world(3, cluster=cluster) as nodes:
        ranks = Ranks(nodes, cluster)
        pair = [comm.subgroup([0, 1]) for comm in ranks.comms[:2]]
        stuck = asyncio.ensure_future(ranks.comms[0].all_reduce(ranks.array(1.0)))
        await ranks.work([comm for comm in pair if comm is not None])
        stuck.cancel()
        await asyncio.gather(stuck, return_exceptions=True)
        assert all(
            isinstance(one, PeerCancelled)
            for one in await outcomes(*(comm.all_reduce(ranks.array(1.0)) for comm in ranks.comms[1:]))
        )
        await ranks.work([comm for comm in pair if comm is not None])
        await ranks.work()


@pytest.mark.parametrize("ticks", [0, 5, 50, 500])
async def test_a_lost_rank_ends_what_runs_and_is_named(ticks: int) -> None:
    cluster = FakeCluster(seed=ticks, longest_delay=30)
    async with device_world(3, cluster=cluster, fabrics=(made := fabrics(cluster, 3))) as nodes:
        ranks = Ranks(nodes, cluster)
        await ranks.work()
        fake_comm(made[2]).fail_later(NcclResult.SYSTEM_ERROR)  # its device does nothing more
        tasks = [asyncio.ensure_future(comm.all_reduce(ranks.array(1.0))) for comm in ranks.comms[:2]]
        for _ in range(ticks):
            await asyncio.sleep(0)
        await asyncio.gather(nodes[2].stop(), *(asyncio.wait([task]) for task in tasks))
        for task in tasks:
            error = task.exception()
            assert isinstance(error, PeerLost)
            assert error.rank == 2
            assert "all_reduce #2" in str(error)


@pytest.mark.parametrize(("transport", "revokes"), in_turn(["inproc", "shm"], [False, True]))
async def test_survivors_shrink_their_communicator_and_go_on(revokes: bool, transport: str) -> None:
    cluster = FakeCluster(seed=1)
    made = fabrics(cluster, 3)
    async with device_world(3, cluster=cluster, fabrics=made, transport=transport) as nodes:
        ranks = Ranks(nodes, cluster)
        await ranks.work()
        cluster.longest_delay = 10**9
        hanging = [asyncio.ensure_future(comm.all_reduce(ranks.array(1.0))) for comm in ranks.comms]
        await asyncio.sleep(0.05)
        if revokes:
            ranks.comms[0].revoke("for a test")
        await nodes[2].stop()
        ended = await outcomes(*hanging)
        assert all(isinstance(error, PeerLost | WorldRevoked) for error in ended[:2]), ended
        cluster.longest_delay = 2
        cluster.drop_work()
        left = await asyncio.gather(*(comm.shrink() for comm in ranks.comms[:2]))
        for _ in range(2):
            await ranks.work(left)
        assert [fabric.shrinks for fabric in made] == [1, 1, 0]


async def test_what_nccl_says_later_is_raised_on_its_rank_and_ends_the_others() -> None:
    cluster = FakeCluster(seed=5)
    async with device_world(2, cluster=cluster, fabrics=(made := fabrics(cluster, 2))) as nodes:
        ranks = Ranks(nodes, cluster)
        await ranks.work()
        fake_comm(made[1]).fail_later(NcclResult.INTERNAL_ERROR)
        first, second = await outcomes(*(comm.all_reduce(ranks.array(1.0)) for comm in ranks.comms))
        assert isinstance(second, DeviceError)
        assert second.result is NcclResult.INTERNAL_ERROR
        assert isinstance(first, PeerCancelled)
        assert first.rank == 1
        assert "ncclInternalError" in str(first)
        await ranks.work()


async def test_a_rank_that_does_not_call_is_named_when_time_is_over() -> None:
    cluster = FakeCluster()
    async with device_world(2, cluster=cluster) as nodes:
        ranks = Ranks(nodes, cluster)
        ranks.comms[0].timeout = 0.3
        with pytest.raises(PeerTimeout) as caught:
            await ranks.comms[0].all_reduce(ranks.array(1.0))
        assert caught.value.rank == 1


async def test_devices_that_hang_end_in_time() -> None:
    cluster = FakeCluster(longest_delay=10**9, seed=2)
    async with device_world(2, cluster=cluster) as nodes:
        ranks = Ranks(nodes, cluster)
        for comm in ranks.comms:
            comm.timeout = 0.3
        ended = await outcomes(*(comm.all_reduce(ranks.array(1.0)) for comm in ranks.comms))
        assert any(isinstance(one, PeerTimeout) for one in ended)
        assert all(isinstance(one, PeerTimeout | PeerCancelled) for one in ended)
        cluster.longest_delay = 1
        cluster.drop_work()
        for comm in ranks.comms:
            comm.timeout = 30.0
        await ranks.work()


async def test_ranks_that_differ_are_notified_and_nothing_is_enqueued() -> None:
    cluster = FakeCluster()
    async with device_world(2, cluster=cluster, fabrics=(made := fabrics(cluster, 2))) as nodes:
        ranks = Ranks(nodes, cluster)
        first, second = ranks.comms
        x = ranks.array
        differing = [
            (first.all_reduce(x(1.0, 4)), second.all_reduce(x(1.0, 5))),
            (first.all_reduce(x(1.0)), second.all_reduce(x(1.0), "max")),
            (first.broadcast(x(1.0), root=0), second.broadcast(x(1.0), root=1)),
            (first.all_reduce(x(1.0)), second.all_gather(x(1.0))),
        ]
        for pair in differing:
            for error in await outcomes(*pair):
                assert isinstance(error, OperationMismatch)
                assert "rank 0 calls" in str(error)
                assert "rank 1 calls" in str(error)
        assert not any(fabric.cluster_communicators for fabric in made)
        await ranks.work()


async def test_an_array_of_the_host_on_one_rank_is_a_mismatch_with_the_remedy() -> None:
    cluster = FakeCluster()
    async with device_world(2, cluster=cluster) as nodes:
        ranks = Ranks(nodes, cluster)
        ended = await outcomes(
            ranks.comms[0].all_reduce(ranks.array(1.0)), ranks.comms[1].all_reduce(np.ones(4, np.float32))
        )
        for error in ended:
            assert isinstance(error, OperationMismatch)
            assert "pass device arrays on all ranks, or on none" in str(error)
            assert "rank 1" in str(error)
        await ranks.work()


async def test_arrays_are_lent_until_the_devices_are_done() -> None:
    cluster = FakeCluster(seed=6, longest_delay=300)
    async with device_world(2, cluster=cluster) as nodes:
        ranks = Ranks(nodes, cluster)
        tasks = [asyncio.ensure_future(comm.all_reduce(ranks.array(1.0))) for comm in ranks.comms]
        await asyncio.sleep(0.02)
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        del tasks
        streams = [cluster.create_stream(0) for _ in range(2)]
        await asyncio.gather(
            *(comm.all_reduce(ranks.array(1.0), stream=on) for comm, on in zip(ranks.comms, streams, strict=True))
        )
        assert all(cluster.synchronize(stream, ticks=100_000) for stream in streams)
        assert cluster.faults == []
        for stream in streams:
            cluster.destroy_stream(stream)


def fabrics(cluster: FakeCluster, size: int) -> list[FakeFabric]:
    return [FakeFabric(cluster, visible=[rank]) for rank in range(size)]


async def test_a_call_that_is_refused_ends_on_the_other_ranks_with_the_reason() -> None:
    cluster = FakeCluster()
    async with device_world(2, cluster=cluster) as nodes:
        ranks = Ranks(nodes, cluster)
        fixed = ranks.array(1.0)
        fixed.is_writable = False
        with pytest.raises(UsageError, match="read-only"):
            ranks.comms[0].all_reduce(fixed)
        with pytest.raises(PeerCancelled, match="read-only"):
            await ranks.comms[1].all_reduce(ranks.array(1.0))
        await ranks.work()
