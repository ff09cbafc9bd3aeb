"""Whether NCCL has a route between hosts is found out by all ranks of a group together, at its first operation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from asyncpar.errors import PeerCancelled, PeerLost, UsageError
from tests.device.device_worlds import device_world
from tests.device.fake_devices import FakeCluster, FakeDeviceArray
from tests.device.fake_fabric import FakeFabric
from tests.products import in_turn
from tests.soak import chosen

HOSTS = ("a", "a", "b", "b")
TROUBLES = ("fail", "hang", "fail at first use", "hang at first use")


@asynccontextmanager
async def two_hosts(
    cluster: FakeCluster, trouble: str, *, at: int = 2, timeout: float = 5.0, pin: str | None = None
) -> AsyncIterator[tuple[list[Any], list[FakeFabric]]]:
    """Yield the communicators of ranks on two hosts, whose NCCL has ``trouble`` between them on rank ``at``."""
    made = [
        FakeFabric(cluster, visible=[place], host=host, cut_off=trouble if place == at else "")
        for place, host in enumerate(HOSTS)
    ]
    async with device_world(4, cluster=cluster, fabrics=made, hosts=HOSTS, pin=pin) as nodes:
        for node in nodes:
            node.world.timeout = timeout
        yield [node.world for node in nodes], made


def full(cluster: FakeCluster, value: float, count: int = 5) -> Any:
    return FakeDeviceArray.of(cluster, np.full(count, value, np.float32))


async def sums(cluster: FakeCluster, comms: list[Any]) -> list[Any]:
    calls = [comm.all_reduce(full(cluster, rank + 1.0)) for rank, comm in enumerate(comms)]
    return list(await asyncio.gather(*calls, return_exceptions=True))


def check(found: list[Any], value: float = 10.0) -> None:
    for result in found:
        assert isinstance(result, FakeDeviceArray), result
        np.testing.assert_array_equal(result.get(), value)


@pytest.mark.parametrize(("trouble", "at"), in_turn(TROUBLES, [0, 2]))
async def test_without_one_all_ranks_go_by_host_and_say_why_once(
    trouble: str, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = FakeCluster(seed=at)
    async with two_hosts(cluster, trouble, at=at, timeout=5.0) as (comms, made):
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                check(await sums(cluster, comms))
        logged = [one.getMessage() for one in caplog.records if "network of this world" in one.getMessage()]
        assert len(logged) == len(comms)
        assert any(f"rank {at}: " in text for text in logged) or "hang" in trouble
        assert len({text.partition(" by NCCL on each host")[2] for text in logged}) == 1, "all ranks give one reason"
        table = comms[3].algorithm_table()
        assert "all_reduce of device arrays  hierarchical: rank " in table
        assert [fabric.inits for fabric in made] == [2] * 4, "of the world, which failed, and of the host"


async def test_with_one_the_first_operation_shows_it_for_good() -> None:
    cluster = FakeCluster()
    async with two_hosts(cluster, "") as (comms, made):
        for _ in range(3):
            check(await sums(cluster, comms))
        assert comms[0].algorithm_table().endswith("all_reduce of device arrays  nccl")
        assert [fabric.inits for fabric in made] == [1] * 4
        assert cluster.allocations <= len(comms), "what was sent to try it out is freed; arrays may be there"


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_operations_that_were_agreed_upon_meanwhile_go_the_same_way(trouble: str) -> None:
    cluster = FakeCluster(seed=1)
    async with two_hosts(cluster, trouble) as (comms, _):
        sum_calls = [comm.all_reduce(full(cluster, rank + 1.0)) for rank, comm in enumerate(comms) for _ in range(3)]
        gathers = [comm.all_gather(full(cluster, rank + 1.0)) for rank, comm in enumerate(comms)]
        copies = [comm.broadcast(full(cluster, rank + 1.0), root=3) for rank, comm in enumerate(comms)]
        async with asyncio.timeout(30):
            found = await asyncio.gather(*sum_calls, *gathers, *copies)
        check(found[:12])
        for rows in found[12:16]:
            np.testing.assert_array_equal(rows.get(), np.repeat([[1.0], [2.0], [3.0], [4.0]], 5, axis=1))
        check(found[16:], 4.0)


async def test_nccl_that_is_pinned_is_refused_on_all_ranks() -> None:
    cluster = FakeCluster()
    async with two_hosts(cluster, "fail", pin="all_reduce@nccl") as (comms, _):
        for _ in range(2):
            for error in await sums(cluster, comms):
                assert isinstance(error, UsageError), error
                assert "rank 2: " in str(error)
        calls = [comm.broadcast(full(cluster, rank + 1.0), root=1) for rank, comm in enumerate(comms)]
        check(await asyncio.gather(*calls), 2.0)


@pytest.mark.parametrize(("trouble", "is_known"), in_turn(["", *TROUBLES], [False, True]))
async def test_messages_between_hosts_find_out_too(trouble: str, is_known: bool) -> None:
    cluster = FakeCluster(seed=2)
    async with two_hosts(cluster, trouble) as (comms, made):
        if is_known:
            check(await sums(cluster, comms))
        inits = [fabric.inits for fabric in made]
        for turn in range(2):
            out = full(cluster, 0.0, 20_000)
            await asyncio.gather(comms[1].send(full(cluster, turn + 1.0, 20_000), 2), comms[2].recv(1, out=out))
            check([out], turn + 1.0)
        way = comms[1].algorithm_table().partition("send of device arrays  ")[2]
        assert way.startswith("staged: rank " if trouble else "nccl")
        new = [fabric.inits - before for fabric, before in zip(made, inits, strict=True)]
        assert new == ([0] * 4 if is_known and trouble else [0, 1, 1, 0])


@pytest.mark.parametrize(
    ("turns", "trouble"), in_turn([*range(0, 30, chosen(6, soak=3)), 45, 80], ["", "fail", "hang"])
)
async def test_a_call_that_is_cancelled_while_it_is_found_out_ends_on_all_ranks(turns: int, trouble: str) -> None:
    cluster = FakeCluster(seed=turns)
    async with two_hosts(cluster, trouble, timeout=5.0) as (comms, _):
        tasks = [asyncio.ensure_future(comm.all_reduce(full(cluster, 1.0))) for comm in comms]
        for _ in range(turns):
            await asyncio.sleep(0)
        tasks[turns % 4].cancel()
        async with asyncio.timeout(30):
            for one in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(one, asyncio.CancelledError | PeerCancelled | FakeDeviceArray), one
        check(await sums(cluster, comms))


@pytest.mark.parametrize(
    ("turns", "trouble", "lost"),
    [(*moment, lost) for moment, lost in in_turn([(3, ""), (12, ""), (40, ""), (12, "hang")], [0, 3])],
)
async def test_a_rank_that_is_lost_while_it_is_found_out_is_named(turns: int, lost: int, trouble: str) -> None:
    cluster = FakeCluster(seed=turns)
    made = [FakeFabric(cluster, visible=[place], host=host) for place, host in enumerate(HOSTS)]
    made[1].cut_off = trouble
    async with device_world(4, cluster=cluster, fabrics=made, hosts=HOSTS) as nodes:
        tasks = [asyncio.ensure_future(node.world.all_reduce(full(cluster, 1.0))) for node in nodes]
        for _ in range(turns):
            await asyncio.sleep(0)
        await nodes[lost].stop()
        async with asyncio.timeout(30):
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for rank, one in enumerate(ended):
            if rank != lost:
                assert isinstance(one, PeerLost | PeerCancelled | FakeDeviceArray), one
                assert isinstance(one, FakeDeviceArray) or one.rank == lost
