"""Device arrays go by NCCL where all ranks have it, else through the host; what cannot be is refused on every rank."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np
import pytest

from asyncpar.device.fabric import DeviceError
from asyncpar.errors import PeerCancelled, UsageError
from asyncpar.node import Node
from tests.device.device_worlds import device_world
from tests.device.fake_devices import FakeCluster, FakeDeviceArray
from tests.device.fake_fabric import FakeFabric
from tests.soak import first


def of(node: Node) -> Any:
    """Return the communicator of ``node``, untyped: its operations are annotated for numpy arrays."""
    return node.world


def ones(cluster: FakeCluster, device: int = 0, dtype: Any = np.float32) -> FakeDeviceArray:
    return FakeDeviceArray.of(cluster, np.ones(5, dtype), device)


async def test_nccl_moves_what_all_ranks_have_on_devices() -> None:
    cluster = FakeCluster()
    async with device_world(2, cluster=cluster) as nodes:
        assert "device arrays" not in of(nodes[0]).algorithm_table()
        await asyncio.gather(*(of(node).all_reduce(ones(cluster)) for node in nodes))
        for node in nodes:
            assert of(node).algorithm_table().endswith("all_reduce of device arrays  nccl")


async def test_a_rank_without_nccl_makes_all_go_through_the_host_which_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = FakeCluster()
    async with device_world(2, cluster=cluster, fabrics=[FakeFabric(cluster), None]) as nodes:
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                found = await asyncio.gather(*(of(node).all_reduce(ones(cluster)) for node in nodes))
        for result in found:
            np.testing.assert_array_equal(result.get(), 2.0)
        logged = [record.getMessage() for record in caplog.records]
        assert len(logged) == len(nodes)
        assert all("rank 1 has no NCCL: there is no driver" in text for text in logged)
        assert "staged: rank 1 has no NCCL: there is no driver" in of(nodes[0]).algorithm_table()
        assert cluster.allocations == 2, "pinned memory is given back"


@pytest.mark.parametrize("how", ["argument", "pin"])
async def test_nccl_that_is_wanted_and_cannot_be_is_refused_on_every_rank(how: str) -> None:
    cluster = FakeCluster()
    pin = "all_reduce@nccl" if how == "pin" else None
    wanted = None if how == "pin" else "nccl"
    async with device_world(2, cluster=cluster, fabrics=[FakeFabric(cluster), None], pin=pin) as nodes:
        calls = [of(node).all_reduce(ones(cluster), algorithm=wanted) for node in nodes]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, UsageError)
            assert "rank 1 has no NCCL: there is no driver" in str(error)


async def test_a_pin_sends_device_arrays_through_the_host_and_leaves_others_alone() -> None:
    cluster = FakeCluster()
    async with device_world(2, cluster=cluster, pin="all_reduce@staged;broadcast@nccl") as nodes:
        await asyncio.gather(*(of(node).all_reduce(ones(cluster)) for node in nodes))
        await asyncio.gather(*(of(node).broadcast(ones(cluster)) for node in nodes))
        await asyncio.gather(*(of(node).all_reduce(np.ones(4)) for node in nodes))
        assert (
            nodes[0]
            .world.algorithm_table()
            .endswith("all_reduce of device arrays  staged\nbroadcast of device arrays  nccl")
        )


async def test_the_table_has_a_line_for_each_size_that_a_pin_distinguishes() -> None:
    cluster = FakeCluster()
    async with device_world(2, cluster=cluster, pin="all_reduce:1k-64k@staged,1m-inf@nccl") as nodes:

        async def reduce(count: int) -> list[str]:
            await asyncio.gather(
                *(of(node).all_reduce(FakeDeviceArray(cluster, (count,), np.dtype(np.uint8))) for node in nodes)
            )
            return [line for line in of(nodes[1]).algorithm_table().splitlines() if "device arrays" in line]

        assert await reduce(10) == [
            "all_reduce of device arrays below 1 KiB  nccl",
            "all_reduce of device arrays from 1 KiB below 64 KiB*  staged, not used yet",
            "all_reduce of device arrays from 64 KiB below 1 MiB  as NCCL can, not used yet",
            "all_reduce of device arrays from 1 MiB*  nccl, not used yet",
        ]
        assert (await reduce(1024))[1] == "all_reduce of device arrays from 1 KiB below 64 KiB*  staged"
        assert (await reduce(1 << 20))[2:] == [
            "all_reduce of device arrays from 64 KiB below 1 MiB  as NCCL can, not used yet",
            "all_reduce of device arrays from 1 MiB*  nccl",
        ]


async def test_what_nccl_does_not_have_goes_through_the_host(caplog: pytest.LogCaptureFixture) -> None:
    cluster = FakeCluster()
    async with device_world(2, cluster=cluster) as nodes:
        with pytest.raises(UsageError, match=r"NCCL has no all_reduce\(int16\[5\], sum\)"):
            of(nodes[0]).all_reduce(ones(cluster, dtype=np.int16), algorithm="nccl")
        with pytest.raises(PeerCancelled):
            await of(nodes[1]).all_reduce(ones(cluster, dtype=np.int16))
        for dtype in (np.int16, np.uint16):
            found = await asyncio.gather(*(of(node).all_reduce(ones(cluster, dtype=dtype)) for node in nodes))
            np.testing.assert_array_equal(found[0].get(), np.full(5, 2, dtype))
        assert len(caplog.records) == len(nodes), "said once"
        assert "staged: NCCL has no all_reduce(uint16[5], sum)" in of(nodes[0]).algorithm_table()


async def test_two_ranks_on_one_device_are_refused_on_every_rank_with_the_remedy() -> None:
    cluster = FakeCluster()
    same = [FakeFabric(cluster, visible=[3]) for _ in range(2)]
    async with device_world(2, cluster=cluster, fabrics=same) as nodes:
        errors = await asyncio.gather(*(of(node).all_reduce(ones(cluster)) for node in nodes), return_exceptions=True)
        for error in errors:
            assert isinstance(error, UsageError)
            assert "ranks 0 and 1 use the same GPU" in str(error)
            assert "NCCL_MULTI_RANK_GPU_ENABLE=1" in str(error)


async def test_ranks_share_a_device_where_nccl_is_set_to_allow_it() -> None:
    cluster = FakeCluster()
    same = [FakeFabric(cluster, visible=[3], allows_shared_devices=True) for _ in range(2)]
    async with device_world(2, cluster=cluster, fabrics=same) as nodes:
        found = await asyncio.gather(*(of(node).all_reduce(ones(cluster)) for node in nodes))
        np.testing.assert_array_equal(found[1].get(), 2.0)


async def test_equal_numbers_of_devices_on_two_hosts_are_different_devices() -> None:
    cluster = FakeCluster()
    apart = [FakeFabric(cluster, visible=[0], host=host) for host in "ab"]
    async with device_world(2, cluster=cluster, fabrics=apart, hosts=["a", "b"]) as nodes:
        found = await asyncio.gather(*(of(node).all_reduce(ones(cluster)) for node in nodes))
        np.testing.assert_array_equal(found[1].get(), 2.0)


async def test_versions_that_differ_are_refused_on_every_rank() -> None:
    cluster = FakeCluster()
    two = [FakeFabric(cluster, visible=[rank], version=version) for rank, version in enumerate((23004, 22701))]
    async with device_world(2, cluster=cluster, fabrics=two) as nodes:
        errors = await asyncio.gather(*(of(node).all_reduce(ones(cluster)) for node in nodes), return_exceptions=True)
        for error in errors:
            assert isinstance(error, UsageError)
            assert "rank 0 has version 2.30.4 and rank 1 has 2.27.1" in str(error)


async def test_wrong_arguments_are_refused_where_they_are_passed_and_reported_to_the_others() -> None:
    cluster = FakeCluster()
    async with device_world(2, cluster=cluster, fabrics=[FakeFabric(cluster), FakeFabric(cluster)]) as nodes:
        x, there = ones(cluster), ones(cluster, 1)
        strided = ones(cluster)
        strided.strides = (8,)
        stream = cluster.create_stream(1)
        wrong: list[tuple[dict[str, Any], Any, str]] = [
            ({"out": there}, x, "rank 0: expected arrays on one device, got arrays on cuda:0, cuda:1"),
            ({"stream": stream}, x, "stream: expected one of cuda:0, where the array is, got one of cuda:1"),
            ({"stream": "main"}, x, "stream: expected a CUDA stream"),
            ({"stream": 1}, np.ones(5), "expected an array on a CUDA device, got a numpy array"),
            ({}, strided, "expected a contiguous device array"),
            ({"out": np.ones(5, np.float32)}, x, "out: expected an array on a CUDA device, got a numpy array"),
            (
                {"algorithm": "ring"},
                x,
                "all_reduce of device arrays has nccl, hierarchical, staged; got 'ring'",
            ),
            ({"op": "average"}, x, "op: expected one of"),
            ({"op": "band"}, x, "band works on integers"),
        ]
        for options, array, message in wrong:
            with pytest.raises(UsageError, match=message):
                of(nodes[0]).all_reduce(array, **options)
            with pytest.raises(PeerCancelled, match="refused") as caught:
                await of(nodes[1]).all_reduce(ones(cluster))
            assert caught.value.rank == 0
        cluster.destroy_stream(stream)


async def test_with_a_stream_the_call_returns_when_it_is_enqueued() -> None:
    cluster = FakeCluster(seed=7, longest_delay=50)
    async with device_world(2, cluster=cluster) as nodes:
        streams = [cluster.create_stream(0) for _ in nodes]
        arrays = [ones(cluster) for _ in nodes]
        for _ in range(3):
            calls = zip(nodes, arrays, streams, strict=True)
            found = await asyncio.gather(*(of(node).all_reduce(x, stream=on) for node, x, on in calls))
            assert found == arrays
        assert arrays[0].get()[0] < 8.0, "it has not run yet"
        assert all(cluster.synchronize(stream) for stream in streams)
        for array in arrays:
            np.testing.assert_array_equal(array.get(), 8.0)
        for stream in streams:
            cluster.destroy_stream(stream)


async def test_work_that_was_enqueued_before_the_call_comes_first() -> None:
    cluster = FakeCluster(seed=8, longest_delay=100)
    async with device_world(2, cluster=cluster) as nodes:
        arrays, sources = [ones(cluster) for _ in nodes], [FakeDeviceArray.of(cluster, np.full(5, 7, np.float32))] * 2
        for array, source in zip(arrays, sources, strict=True):
            array.stream = cluster.create_stream(0)
            cluster.copy(array.address, source.address, array.nbytes, array.stream)
        found = await asyncio.gather(*(of(node).all_reduce(x) for node, x in zip(nodes, arrays, strict=True)))
        for result in found:
            np.testing.assert_array_equal(result.get(), 14.0)
            cluster.destroy_stream(result.stream)


async def test_a_stream_that_was_destroyed_is_an_error_of_cuda() -> None:
    cluster = FakeCluster()
    async with device_world(1, cluster=cluster) as nodes:
        with pytest.raises(DeviceError, match="is no stream"):
            await of(nodes[0]).all_reduce(ones(cluster), stream=99)


@pytest.mark.parametrize("algorithm", ["nccl", "staged"])
@pytest.mark.parametrize("seed", first(1, range(4)))
async def test_work_in_the_streams_of_all_arrays_comes_first(algorithm: str, seed: int) -> None:
    """Also in those of further arrays, and of where results go."""
    cluster = FakeCluster(seed=seed, longest_delay=1)
    async with device_world(2, cluster=cluster) as nodes:
        sources = [FakeDeviceArray.of(cluster, np.full(5, value, np.float32)) for value in (3, 4)]
        kept = [ones(cluster) for _ in nodes]

        def slowly(target: FakeDeviceArray, source: FakeDeviceArray, stream: int | None = None) -> None:
            cluster.longest_delay = 2000
            cluster.copy(target.address, source.address, target.nbytes, target.stream if stream is None else stream)
            cluster.longest_delay = 1

        async def call(node: Node) -> list[Any]:
            arrays, out = [ones(cluster) for _ in sources], FakeDeviceArray(cluster, (2, 5), np.dtype(np.float32))
            out.set(np.full((2, 5), 7, np.float32))
            for array, source in zip(arrays, sources, strict=True):
                array.stream = cluster.create_stream(0)
                slowly(array, source)
            out.stream = cluster.create_stream(0)
            slowly(kept[node.rank], out, out.stream)
            sums = await of(node).all_reduce_many(arrays, algorithm=algorithm)
            await of(node).all_gather(sums[0], out=out, algorithm=algorithm)
            return [*arrays, out]

        for *sums, out in await asyncio.gather(*(call(node) for node in nodes)):
            assert [one.get()[0] for one in sums] == [6, 8]
            assert (out.get() == 6).all()
            for one in (*sums, out):
                assert cluster.synchronize(one.stream)
                cluster.destroy_stream(one.stream)
        assert all((one.get() == 7).all() for one in kept), "the result came before the copy of what was there"
