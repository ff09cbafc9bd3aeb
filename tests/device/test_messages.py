"""Messages of device arrays keep their order and tags, and either end may be on the host."""

from __future__ import annotations

import asyncio
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from asyncpar.device.fabric import DeviceError
from asyncpar.errors import OperationMismatch, PeerCancelled, UsageError
from tests.device.device_worlds import device_world
from tests.device.fake_devices import FakeCluster, FakeDeviceArray
from tests.device.fake_fabric import FakeFabric
from tests.soak import first


@pytest.mark.parametrize("count", [0, 3, 200_000])
@pytest.mark.parametrize("has_nccl", [True, False])
async def test_device_arrays_are_sent_and_received_in_order(count: int, has_nccl: bool) -> None:
    cluster = FakeCluster(seed=count)
    fabrics = [FakeFabric(cluster), FakeFabric(cluster, visible=[1]) if has_nccl else None]
    async with device_world(2, cluster=cluster, fabrics=fabrics) as nodes:
        left, right = (node.world for node in nodes)
        dtype = np.dtype(ml_dtypes.bfloat16)
        given: list[Any] = [FakeDeviceArray.of(cluster, np.full(count, i, dtype)) for i in range(3)]
        taken: list[Any] = [FakeDeviceArray(cluster, (count,), dtype) for _ in range(3)]
        receives = [right.recv(0, out=x) for x in taken]
        await asyncio.gather(*(left.send(x, 1) for x in given), *receives)
        for i, array in enumerate(taken):
            np.testing.assert_array_equal(array.get(), np.full(count, i, dtype))
        assert cluster.allocations == len(given) + len(taken), "pinned memory is given back"


async def test_one_end_may_be_on_the_host_and_any_rank_the_source() -> None:
    cluster = FakeCluster()
    async with device_world(2, cluster=cluster) as nodes:
        left, right = (node.world for node in nodes)
        there: Any = FakeDeviceArray.of(cluster, np.arange(4.0))
        received, _ = await asyncio.gather(right.recv(0), left.send(there, 1))
        np.testing.assert_array_equal(received, np.arange(4.0))
        (source, same), _ = await asyncio.gather(right.recv_any(out=there), left.send(np.ones(4), 1))
        assert (source, same) == (0, there)
        np.testing.assert_array_equal(there.get(), np.ones(4))


async def test_wrong_arrays_are_refused_and_reported() -> None:
    cluster = FakeCluster()
    async with device_world(2, cluster=cluster) as nodes:
        left, right = nodes[0].world, nodes[1].world
        x: Any = FakeDeviceArray.of(cluster, np.arange(4.0))
        fixed: Any = FakeDeviceArray.of(cluster, np.arange(4.0))
        fixed.is_writable = False
        with pytest.raises(UsageError, match="read-only"):
            await right.recv(0, out=fixed)
        with pytest.raises(PeerCancelled):
            await left.send(np.ones(1 << 20), 1)
        other: Any = FakeDeviceArray.of(cluster, np.arange(5.0))
        receiving = asyncio.ensure_future(right.recv(0, out=other))
        for error in await asyncio.gather(left.send(x, 1), receiving, return_exceptions=True):
            assert error is None or isinstance(error, OperationMismatch)
        assert isinstance(receiving.exception(), OperationMismatch)


@pytest.mark.parametrize("seed", first(2, range(5)))
async def test_a_message_is_written_after_what_the_stream_of_its_array_holds(seed: int) -> None:
    cluster = FakeCluster(seed=seed, longest_delay=300)
    async with device_world(2, cluster=cluster) as nodes:
        left, right = (node.world for node in nodes)
        earlier: Any = FakeDeviceArray.of(cluster, np.zeros(4))
        out: Any = FakeDeviceArray(cluster, (4,), np.dtype(float))
        out.stream = cluster.create_stream(0)
        cluster.copy(out.address, earlier.address, out.nbytes, out.stream)
        await asyncio.gather(left.send(np.ones(4), 1), right.recv(0, out=out))
        assert cluster.synchronize(out.stream)
        np.testing.assert_array_equal(out.get(), np.ones(4))
        cluster.destroy_stream(out.stream)


async def test_a_stream_that_hangs_ends_the_message_in_time() -> None:
    cluster = FakeCluster()
    async with device_world(2, cluster=cluster) as nodes:
        left, right = (node.world for node in nodes)
        left.timeout = right.timeout = 0.3
        out: Any = FakeDeviceArray(cluster, (4,), np.dtype(float))
        out.stream = cluster.create_stream(0)
        cluster.longest_delay = 10**9
        cluster.copy(out.address, out.address, out.nbytes, out.stream)
        cluster.longest_delay = 1
        async with asyncio.timeout(30):
            found = await asyncio.gather(left.send(np.ones(4), 1), right.recv(0, out=out), return_exceptions=True)
        assert isinstance(found[1], DeviceError), found
        assert "was not written within 0.3 s" in str(found[1])
        cluster.end_waits(out.stream)
        cluster.destroy_stream(out.stream)
