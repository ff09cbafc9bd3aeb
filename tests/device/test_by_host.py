"""Hosts between which NCCL has no route: it works on each host, and the lanes of the world carry the rest."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from asyncpar.core.config.names import Name, ReduceOp
from asyncpar.errors import PeerCancelled, PeerLost, UsageError
from asyncpar.node import Node
from tests.device.device_worlds import device_world
from tests.device.fake_devices import FakeCluster, FakeDeviceArray
from tests.device.fake_fabric import FakeFabric
from tests.products import sampled
from tests.soak import chosen

HOSTS = ("a", "a", "b", "b")


@asynccontextmanager
async def two_hosts(
    cluster: FakeCluster, *, hosts: tuple[str, ...] = HOSTS, has_route: bool = False, pin: str | None = None
) -> AsyncIterator[tuple[Node, ...]]:
    made = [
        FakeFabric(cluster, visible=[place], host=host, reaches_other_hosts=has_route)
        for place, host in enumerate(hosts)
    ]
    async with device_world(len(hosts), cluster=cluster, fabrics=made, hosts=hosts, pin=pin) as nodes:
        yield tuple(nodes)


def arrays(cluster: FakeCluster, size: int, dtype: Any = np.float32, count: int = 5) -> list[Any]:
    return [FakeDeviceArray.of(cluster, np.arange(count).astype(dtype) + dtype(rank)) for rank in range(size)]


@pytest.mark.parametrize(
    ("op", "dtype", "hosts"),
    sampled(
        ["sum", "mean", "max", "prod"],
        [np.float32, np.int32, ml_dtypes.bfloat16],
        [HOSTS, ("a", "b", "a"), ("a", "b")],
        where=lambda op, dtype, _: op != "mean" or dtype is not np.int32,
    ),
)
async def test_all_reduce_goes_by_host_where_nccl_has_no_route(
    op: ReduceOp, dtype: Any, hosts: tuple[str, ...]
) -> None:
    cluster = FakeCluster(seed=1)
    async with two_hosts(cluster, hosts=hosts) as nodes:
        given = arrays(cluster, len(hosts), dtype)
        values = np.stack([x.get() for x in given]).astype(np.float64)
        expected = getattr(np, op)(values, axis=0)
        for _ in range(2):
            copies: list[Any] = [FakeDeviceArray.of(cluster, x.get()) for x in given]
            calls = zip(nodes, copies, strict=True)
            found: list[Any] = list(await asyncio.gather(*(node.world.all_reduce(x, op) for node, x in calls)))
            for result in found:
                np.testing.assert_array_equal(result.get(), found[0].get())
                np.testing.assert_allclose(result.get().astype(np.float64), expected, rtol=1e-2)
        assert cluster.allocations == len(given) + len(copies), "pinned memory is given back"


@pytest.mark.parametrize("root", chosen([0, 3], soak=range(4)))
async def test_broadcast_goes_by_host(root: int) -> None:
    cluster = FakeCluster(seed=root)
    async with two_hosts(cluster) as nodes:
        given = arrays(cluster, 4)
        expected = given[root].get()
        calls = zip(nodes, given, strict=True)
        found: list[Any] = list(await asyncio.gather(*(node.world.broadcast(x, root=root) for node, x in calls)))
        for result in found:
            np.testing.assert_array_equal(result.get(), expected)


async def test_it_is_logged_once_and_shown_in_the_table(caplog: pytest.LogCaptureFixture) -> None:
    cluster = FakeCluster(seed=2)
    async with two_hosts(cluster) as nodes:
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                calls = zip(nodes, arrays(cluster, 4), strict=True)
                await asyncio.gather(*(node.world.all_reduce(x) for node, x in calls))
            calls = zip(nodes, arrays(cluster, 4), strict=True)
            await asyncio.gather(*(node.world.all_gather(x) for node, x in calls))
        logged = [record.getMessage() for record in caplog.records]
        assert len([text for text in logged if "by NCCL on each host, and the network of this world" in text]) == 4
        assert all("NCCL of rank 0 does not reach other hosts" in text for text in logged)
        table = nodes[3].world.algorithm_table()
        assert "all_reduce of device arrays  hierarchical: NCCL of rank 0 does not reach other hosts" in table
        assert "all_gather of device arrays  staged: NCCL of rank 0 does not reach other hosts" in table


async def test_nccl_that_is_wanted_without_a_route_is_refused_on_every_rank() -> None:
    cluster = FakeCluster(seed=3)
    async with two_hosts(cluster, pin="all_reduce@nccl") as nodes:
        calls = [node.world.all_reduce(x) for node, x in zip(nodes, arrays(cluster, 4), strict=True)]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, UsageError)
            assert "ASYNCPAR_NCCL_BETWEEN_HOSTS=0" in str(error)


@pytest.mark.parametrize("hosts", [HOSTS, ("a", "a")])
async def test_a_pin_makes_it_go_by_host_where_nccl_has_a_route(hosts: tuple[str, ...]) -> None:
    cluster = FakeCluster(seed=4)
    async with two_hosts(cluster, hosts=hosts, has_route=True, pin="all_reduce@hierarchical") as nodes:
        calls = zip(nodes, arrays(cluster, len(hosts)), strict=True)
        found: list[Any] = list(await asyncio.gather(*(node.world.all_reduce(x) for node, x in calls)))
        np.testing.assert_array_equal(found[-1].get(), sum(np.arange(5) + rank for rank in range(len(hosts))))
        way = "hierarchical" if len(set(hosts)) > 1 else "nccl"
        assert nodes[0].world.algorithm_table().endswith(f"all_reduce of device arrays  {way}")


async def test_what_has_no_way_by_host_is_not_pinned_to_it() -> None:
    cluster = FakeCluster()
    async with two_hosts(cluster, hosts=("a", "a")) as nodes:
        x = arrays(cluster, 1)[0]
        with pytest.raises(UsageError, match="all_gather of device arrays has nccl, staged; got 'hierarchical'"):
            await nodes[0].world.all_gather(x, algorithm=Name("hierarchical"))
        with pytest.raises(PeerCancelled):
            await nodes[1].world.all_gather(x)


@pytest.mark.parametrize("turns", [*range(0, 60, chosen(9, soak=3)), 80, 150])
async def test_cancelled_and_lost_ranks_end_it_on_all_ranks(turns: int) -> None:
    cluster = FakeCluster(seed=turns)
    async with two_hosts(cluster) as nodes:
        calls = zip(nodes, arrays(cluster, 4), strict=True)
        tasks = [asyncio.ensure_future(node.world.all_reduce(x)) for node, x in calls]
        for _ in range(turns):
            await asyncio.sleep(0)
        tasks[2].cancel()
        async with asyncio.timeout(30):
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    assert isinstance(outcome, PeerCancelled | asyncio.CancelledError), outcome
            calls = zip(nodes, arrays(cluster, 4), strict=True)
            await asyncio.gather(*(node.world.all_reduce(x) for node, x in calls))
        async with asyncio.timeout(30):
            calls = zip(nodes[:3], arrays(cluster, 3), strict=True)
            waiting = [asyncio.ensure_future(node.world.all_reduce(x)) for node, x in calls]
            await asyncio.sleep(0)
            await nodes[3].stop()
            for error in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(error, PeerLost), error
                assert error.rank == 3


@pytest.mark.parametrize("turns", range(0, 40, chosen(6, soak=2)))
async def test_a_rank_that_is_cancelled_on_the_way_through_the_host_ends_it_on_all_ranks(turns: int) -> None:
    cluster = FakeCluster(seed=turns)
    async with device_world(3, cluster=cluster, pin="all_reduce@staged") as nodes:
        calls = zip(nodes, arrays(cluster, 3), strict=True)
        tasks = [asyncio.ensure_future(node.world.all_reduce(x)) for node, x in calls]
        for _ in range(turns):
            await asyncio.sleep(0)
        tasks[1].cancel()
        async with asyncio.timeout(30):
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    assert isinstance(outcome, PeerCancelled | asyncio.CancelledError), outcome
            calls = zip(nodes, arrays(cluster, 3), strict=True)
            await asyncio.gather(*(node.world.all_reduce(x) for node, x in calls))
