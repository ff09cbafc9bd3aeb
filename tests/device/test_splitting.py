"""Groups of a split get their communicators of NCCL from the one that is split, where all ranks have it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from asyncpar.errors import PeerError, PeerTimeout
from tests.device.device_worlds import device_world
from tests.device.fake_devices import FakeCluster, FakeDeviceArray
from tests.device.fake_fabric import FakeFabric


def ones(cluster: FakeCluster, device: int = 0) -> Any:
    return FakeDeviceArray.of(cluster, np.ones(3, np.float32), device)


def fabrics(cluster: FakeCluster, size: int) -> list[FakeFabric]:
    return [FakeFabric(cluster, visible=[rank]) for rank in range(size)]


async def work(cluster: FakeCluster, comms: list[Any]) -> None:
    for result in await asyncio.gather(*(comm.all_reduce(ones(cluster)) for comm in comms)):
        np.testing.assert_array_equal(result.get(), float(len(comms)))


@pytest.mark.parametrize("transport", ["inproc", "shm"])
async def test_a_split_of_a_connected_group_splits_its_communicator(transport: str) -> None:
    cluster = FakeCluster(seed=1)
    made = fabrics(cluster, 5)
    async with device_world(5, cluster=cluster, fabrics=made, transport=transport) as nodes:
        comms: list[Any] = [node.world for node in nodes]
        await work(cluster, comms)
        under_way = [comm.all_reduce(ones(cluster)) for comm in comms]
        colors = [-7, 10**12, -7, 10**12, None]
        splits = [comm.split(color, key=-comm.rank) for comm, color in zip(comms, colors, strict=True)]
        parts: list[Any] = list((await asyncio.gather(asyncio.gather(*splits), *under_way))[0])
        assert [part and part.ranks for part in parts] == [(2, 0), (3, 1), (2, 0), (3, 1), None]
        for pair in ([parts[2], parts[0]], [parts[3], parts[1]]):
            await work(cluster, pair)
        await work(cluster, comms)
        assert [(fabric.splits, fabric.inits) for fabric in made] == [(1, 1)] * 5


@pytest.mark.parametrize("seed", range(4))
async def test_operations_behind_splits_do_not_hold_them_up(seed: int) -> None:
    """A split waits for what runs on the communicator, not for what waits for the split."""
    cluster = FakeCluster(seed=seed, longest_delay=30)
    async with device_world(2, cluster=cluster) as nodes:
        comms: list[Any] = [node.world for node in nodes]
        await work(cluster, comms)
        calls = []
        for _ in range(3):
            splits = [comm.split(0) for comm in comms]
            behind = [comm.all_reduce(ones(cluster)) for comm in comms]
            calls += [asyncio.ensure_future(call) for call in (*splits, *behind)]
            for _ in range(seed * 10):
                await asyncio.sleep(0)
        async with asyncio.timeout(30):
            found = await asyncio.gather(*calls)
        for part in (one for one in found if not isinstance(one, FakeDeviceArray)):
            assert part.ranks == (0, 1)


async def test_without_a_communicator_to_split_one_is_made_from_a_unique_id() -> None:
    cluster = FakeCluster(seed=2)
    made = fabrics(cluster, 2)
    async with device_world(2, cluster=cluster, fabrics=made) as nodes:
        parts: list[Any] = list(await asyncio.gather(*(node.world.split(0) for node in nodes)))
        await work(cluster, parts)
        assert [(fabric.splits, fabric.inits) for fabric in made] == [(0, 1)] * 2
        assert len(cluster.cliques) == 1


async def test_a_part_that_is_first_used_on_another_device_gets_a_new_communicator() -> None:
    cluster = FakeCluster(seed=3)
    made = [FakeFabric(cluster, visible=[rank, rank + 2]) for rank in range(2)]
    async with device_world(2, cluster=cluster, fabrics=made) as nodes:
        comms: list[Any] = [node.world for node in nodes]
        await work(cluster, comms)
        parts: list[Any] = list(await asyncio.gather(*(comm.split(0) for comm in comms)))
        found = await asyncio.gather(*(part.all_reduce(ones(cluster, 1)) for part in parts))
        np.testing.assert_array_equal(found[0].get(), 2.0)
        assert [(fabric.splits, fabric.inits) for fabric in made] == [(1, 2)] * 2


async def test_a_rank_that_does_not_come_to_a_split_is_named_in_time() -> None:
    cluster = FakeCluster(seed=4)
    async with device_world(3, cluster=cluster) as nodes:
        comms: list[Any] = [node.world for node in nodes]
        await work(cluster, comms)
        for comm in comms:
            comm.timeout = 0.3
        ended = await asyncio.gather(*(comm.split(0) for comm in comms[:2]), return_exceptions=True)
        assert all(isinstance(error, PeerError) for error in ended)
        assert any(isinstance(error, PeerTimeout) and error.rank == 2 for error in ended)


async def test_parts_that_are_never_used_are_freed_with_their_group() -> None:
    cluster = FakeCluster(seed=5)
    made = fabrics(cluster, 2)
    async with device_world(2, cluster=cluster, fabrics=made) as nodes:
        comms: list[Any] = [node.world for node in nodes]
        await work(cluster, comms)
        parts: list[Any] = list(await asyncio.gather(*(comm.split(0) for comm in comms)))
        assert [len(fabric.cluster_communicators) for fabric in made] == [2, 2]
        for part in parts:
            part.close()
        for _ in range(1000):
            if all(len(fabric.cluster_communicators) == 1 for fabric in made):
                return
            await asyncio.sleep(0.01)
        raise AssertionError("a part was left behind")


async def test_parts_that_are_never_used_are_freed_with_the_world() -> None:
    cluster = FakeCluster(seed=6)
    async with device_world(2, cluster=cluster) as nodes:
        comms: list[Any] = [node.world for node in nodes]
        await work(cluster, comms)
        kept = await asyncio.gather(*(comm.split(0) for comm in comms))
    assert all(kept)
