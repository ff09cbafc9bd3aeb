"""The cost model of device arrays: measured or given figures choose, the same on all ranks, and the table has them."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from asyncpar.collectives.device import calibration
from asyncpar.core.config.device_lanes import DeviceLanes
from asyncpar.core.config.transport import LaneCosts
from asyncpar.device.fabric import DeviceError
from asyncpar.errors import OperationMismatch, UsageError
from tests.device.device_worlds import device_world
from tests.device.fake_devices import FakeCluster, FakeDeviceArray
from tests.device.fake_fabric import FakeFabric

HOSTS = ("a", "a", "b", "b")
SLOW = LaneCosts(latency=1.0, bandwidth=1e6)


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_LARGE_BYTES", 1 << 16)


def full(cluster: FakeCluster, value: float) -> Any:
    return FakeDeviceArray.of(cluster, np.full(6, value, np.float32))


async def sums(cluster: FakeCluster, nodes: Any, **options: Any) -> list[Any]:
    calls = [node.world.all_reduce(full(cluster, node.rank + 1.0), **options) for node in nodes]
    return list(await asyncio.gather(*calls, return_exceptions=True))


def way(comm: Any) -> str:
    return str(comm.algorithm_table().rpartition("all_reduce of device arrays  ")[2])


@pytest.mark.parametrize(
    ("hosts", "cut_off"), [(None, ""), (HOSTS, ""), (HOSTS, "fail"), (("a", "b"), ""), (("a",), "")]
)
async def test_calibrating_measures_what_is_there_and_all_ranks_have_the_same(
    hosts: tuple[str, ...] | None, cut_off: str
) -> None:
    cluster = FakeCluster()
    size = 2 if hosts is None else len(hosts)
    made = [
        FakeFabric(cluster, visible=[place], host=hosts[place] if hosts else "a", cut_off=cut_off)
        for place in range(size)
    ]
    async with device_world(size, cluster=cluster, fabrics=made, hosts=hosts) as nodes:
        await asyncio.gather(*(node.world.calibrate(device=0) for node in nodes))
        lanes = {node.world.device_lanes for node in nodes}
        assert len(lanes) == 1
        (found,) = lanes
        assert found.copy.is_measured
        assert found.within.is_measured == (hosts is None or hosts.count("a") > 1)
        assert found.between.is_measured == (len(set(hosts or "a")) > 1 and not cut_off)
        for result in await sums(cluster, nodes):
            np.testing.assert_array_equal(result.get(), sum(range(1, size + 1)))
        table = nodes[0].world.algorithm_table()
        assert "lanes of devices: within " in table
        assert "us, measured" in table
        assert "all_reduce on devices" in table
        assert nodes[0].world.predict("all_reduce", 1 << 20, on_devices=True) > 0
    assert cluster.allocations <= size, "its memory is given back"


@pytest.mark.parametrize("lacks", ["fabric", "room"])
async def test_a_rank_that_cannot_be_measured_is_named_on_all(lacks: str) -> None:
    cluster = FakeCluster()
    fabrics: list[FakeFabric | None] = [FakeFabric(cluster), FakeFabric(cluster, visible=[1])]
    if lacks == "fabric":
        fabrics[1] = None
    else:
        fabrics[1].allocate = _no_room  # type: ignore[union-attr,method-assign]
    async with device_world(2, cluster=cluster, fabrics=fabrics) as nodes:
        async with asyncio.timeout(30):
            found = await asyncio.gather(*(node.world.calibrate(device=0) for node in nodes), return_exceptions=True)
        for error in found:
            assert isinstance(error, UsageError)
            assert "rank 1 has no NCCL to measure, or no room" in str(error)
        assert ("there is no driver" if lacks == "fabric" else "out of memory") in str(found[1])
        assert nodes[0].world.device_lanes.is_built_in
        assert cluster.allocations == 0


def _no_room(nbytes: int, device: int) -> int:
    raise DeviceError("cuda: cudaMalloc: out of memory")


@pytest.mark.parametrize(
    ("lanes", "expected"),
    [
        (DeviceLanes(), "nccl"),
        (DeviceLanes(between=SLOW), "hierarchical"),
        (DeviceLanes(between=SLOW, within=SLOW), "staged"),
        (DeviceLanes(between=SLOW, within=SLOW, copy=LaneCosts(latency=9.0, bandwidth=1e3)), "nccl"),
    ],
)
async def test_given_figures_choose_the_way_and_results_are_the_same(lanes: DeviceLanes, expected: str) -> None:
    cluster = FakeCluster()
    made = [FakeFabric(cluster, visible=[place], host=host) for place, host in enumerate(HOSTS)]
    async with device_world(4, cluster=cluster, fabrics=made, hosts=HOSTS) as nodes:
        for node in nodes:
            node.world.set_device_lanes(lanes)
        for result in await sums(cluster, nodes):
            np.testing.assert_array_equal(result.get(), 10.0)
        assert way(nodes[0].world) == expected
        comms: list[Any] = [node.world for node in nodes]
        rows = [
            comm.all_gather_v(FakeDeviceArray.of(cluster, np.full(place + 1, 1.0, np.float32)))
            for place, comm in enumerate(comms)
        ]
        for result in await asyncio.gather(*rows):
            assert len(result.get()) == 10, "what ranks pass differs in size: sizes choose nothing"


async def test_ranks_with_other_figures_are_notified_before_anything_moves() -> None:
    cluster = FakeCluster()
    async with device_world(2, cluster=cluster) as nodes:
        nodes[1].world.set_device_lanes(DeviceLanes(within=SLOW))
        for error in await sums(cluster, nodes):
            assert isinstance(error, OperationMismatch)
            assert "1 s" in str(error) or "1e+06 us" in str(error)
        for result in await sums(cluster, nodes, algorithm="nccl"):
            np.testing.assert_array_equal(result.get(), 3.0)
        with pytest.raises(UsageError, match="lanes: expected DeviceLanes"):
            nodes[0].world.set_device_lanes(SLOW)  # type: ignore[arg-type]


async def test_the_table_shows_estimates_of_what_was_used_and_what_cannot_be() -> None:
    cluster = FakeCluster()
    async with device_world(2, cluster=cluster, fabrics=[FakeFabric(cluster), None]) as nodes:
        assert "on devices" not in nodes[0].world.algorithm_table()
        await sums(cluster, nodes)
        lines = [line for line in nodes[0].world.algorithm_table().splitlines() if line.startswith("all_reduce on")]
        assert len(lines) == 10
        assert all("  staged " in line and "no nccl " in line for line in lines)
