"""Figures of lanes come from operations that ran anyway, and change choices at one place, alike on all ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.collectives.lane_cache import LaneCache
from asyncpar.collectives.lane_estimate import LaneEstimate
from asyncpar.core.config.transport import LaneCosts
from asyncpar.errors import PeerCancelled, UsageError
from tests.collectives.conftest import OpenRanks, Ranks

LATENCY, BANDWIDTH = 3e-4, 1.2e8


async def on_all(ranks: Ranks, main: Callable[[Communicator], Awaitable[object]]) -> Sequence[object]:
    async with asyncio.timeout(30.0):
        return await asyncio.gather(*map(main, ranks.communicators), return_exceptions=True)


def observe(estimate: LaneEstimate, *, latency: float = LATENCY, bandwidth: float = BANDWIDTH, times: int = 8) -> None:
    for _ in range(times):
        estimate.add(rounds=2, payload=64, seconds=2 * latency)
        estimate.add(rounds=2, payload=1 << 22, seconds=2 * latency + (1 << 22) / bandwidth)


def pretend(ranks: Ranks, *, latency: float = LATENCY, bandwidth: float = BANDWIDTH) -> None:
    """Let all ranks have seen a link like this."""
    for communicator in ranks.communicators:
        observe(communicator._engine.lanes, latency=latency, bandwidth=bandwidth)  # noqa: SLF001  # in-process lanes have other speeds every time


def test_small_operations_show_the_latency_and_large_ones_the_bandwidth() -> None:
    estimate = LaneEstimate()
    assert (estimate.latency, estimate.bandwidth) == (None, None)
    observe(estimate)
    assert estimate.latency == pytest.approx(LATENCY)
    assert estimate.bandwidth == pytest.approx(BANDWIDTH)


def test_operations_that_were_held_up_or_lucky_do_not_count() -> None:
    estimate = LaneEstimate()
    observe(estimate, latency=100 * LATENCY, bandwidth=BANDWIDTH / 100, times=20)
    observe(estimate, times=10)
    observe(estimate, latency=LATENCY / 100, bandwidth=BANDWIDTH * 100, times=1)
    assert estimate.latency == pytest.approx(LATENCY)
    assert estimate.bandwidth == pytest.approx(BANDWIDTH, rel=0.05)


def test_a_link_that_has_become_slower_shows() -> None:
    estimate = LaneEstimate()
    observe(estimate, times=100)
    observe(estimate, latency=10 * LATENCY, bandwidth=BANDWIDTH / 10, times=32)
    assert estimate.latency == pytest.approx(10 * LATENCY)
    assert estimate.bandwidth == pytest.approx(BANDWIDTH / 10)


def test_an_operation_without_a_duration_makes_no_figure() -> None:
    estimate = LaneEstimate()
    estimate.add(rounds=1, payload=64, seconds=0.0)
    assert estimate.latency is None


async def test_operations_give_all_ranks_the_same_figures(open_ranks: OpenRanks) -> None:
    async with open_ranks(3, hosts=("a", "b", "c")) as ranks:
        before = ranks.communicators[0].algorithm_table()
        assert before.splitlines()[-1].endswith("built in")
        for count in (8, 1 << 18):
            for _ in range(3):
                await on_all(ranks, lambda c, count=count: c.all_reduce(np.ones(count)))  # type: ignore[misc]
        assert {c.algorithm_table() for c in ranks.communicators} == {before}, "nothing changes by itself"
        assert {c.measured_lane for c in ranks.communicators} == {None}
        await on_all(ranks, lambda c: c.calibrate(from_operations=True))
        tables = {c.algorithm_table() for c in ranks.communicators}
        assert len(tables) == 1
        assert tables.pop().splitlines()[-1].endswith("measured")
        lanes = {c.measured_lane for c in ranks.communicators}
        assert len(lanes) == 1
        assert None not in lanes
        results = await on_all(ranks, lambda c: c.all_reduce(np.ones(5000)))
        assert all(float(result[0]) == 3.0 for result in results)  # type: ignore[index]


async def test_figures_do_not_come_from_the_coarse_clock_of_the_loop(open_ranks: OpenRanks) -> None:
    async with open_ranks(2, hosts=("a", "b")) as ranks:
        for communicator in ranks.communicators:
            communicator._engine.table.now = lambda: 1.0  # noqa: SLF001  # that of uvloop stands still for a millisecond
        for count in (8, 1 << 18):
            await on_all(ranks, lambda c, count=count: c.all_reduce(np.ones(count)))  # type: ignore[misc]
        for communicator in ranks.communicators:
            lanes = communicator._engine.lanes  # noqa: SLF001  # nothing has been agreed upon yet
            assert lanes.latency is not None
            assert lanes.bandwidth is not None


async def test_the_quickest_rank_counts_and_choices_follow(open_ranks: OpenRanks) -> None:
    async with open_ranks(4, hosts=("a", "b", "c", "d")) as ranks:
        payload = 64 << 10
        pretend(ranks, latency=2e-3, bandwidth=1e9)
        observe(ranks.communicators[2]._engine.lanes, latency=1e-3, bandwidth=2e9, times=32)  # noqa: SLF001
        await on_all(ranks, lambda c: c.calibrate(from_operations=True))
        found = {c.measured_lane for c in ranks.communicators}
        lane = found.pop()
        assert not found
        assert lane is not None
        assert lane.latency == pytest.approx(1e-3)
        assert lane.bandwidth == pytest.approx(2e9, rel=0.01)
        await on_all(ranks, lambda c: c.all_reduce(np.ones(payload // 8)))
        by_latency = ranks.communicators[0].traffic.operations
        assert "doubling" in {one.algorithm for one in by_latency if one.payload_bytes >= payload}


async def test_pinned_algorithms_stay(open_ranks: OpenRanks) -> None:
    async with open_ranks(4, hosts=("a", "b", "c", "d"), pin="all_reduce@ring") as ranks:
        pretend(ranks, latency=2e-3, bandwidth=1e9)
        await on_all(ranks, lambda c: c.calibrate(from_operations=True))
        await on_all(ranks, lambda c: c.all_reduce(np.ones(8)))
        assert {entry.algorithm for entry in ranks.communicators[0].traffic.operations} == {"ring"}


async def test_without_operations_nothing_changes(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        before = ranks.communicators[0].algorithm_table()
        assert await on_all(ranks, lambda c: c.calibrate(from_operations=True)) == [None, None]
        assert ranks.communicators[1].algorithm_table() == before


async def test_groups_made_later_choose_by_the_figures(open_ranks: OpenRanks) -> None:
    async with open_ranks(3, hosts=("a", "b", "c")) as ranks:
        pretend(ranks)
        await on_all(ranks, lambda c: c.calibrate(from_operations=True))
        part = ranks.communicators[0].subgroup([0, 1])
        assert part is not None
        assert part.algorithm_table().splitlines()[-1] == "lanes: between hosts 0.12 GB/s, 300 us, measured"
        assert part.measured_lane is None, "another group has other links"


async def test_a_group_inside_of_a_host_chooses_by_the_figures_of_lanes_there(open_ranks: OpenRanks) -> None:
    async with open_ranks(3, hosts=("a", "a", "b")) as ranks:
        world = ranks.communicators[0]
        before = world.subgroup([0, 1])
        pretend(ranks)
        await on_all(ranks, lambda c: c.calibrate(from_operations=True))
        inside, between = world.subgroup([0, 1], key="inside"), world.subgroup([0, 2])
        assert before is not None
        assert inside is not None
        assert between is not None
        assert inside.algorithm_table().splitlines()[-1] == before.algorithm_table().splitlines()[-1], "not measured"
        assert between.algorithm_table().splitlines()[-1] == "lanes: between hosts 0.12 GB/s, 300 us, measured"


@pytest.mark.parametrize("first", [True, False])
async def test_ranks_that_calibrate_in_different_ways_are_notified(open_ranks: OpenRanks, first: bool) -> None:
    async with open_ranks(2) as ranks:
        before = ranks.communicators[0].algorithm_table()
        errors = await on_all(ranks, lambda c: c.calibrate(from_operations=first == (c.rank == 0)))
        assert all("calibrate" in str(error) and "all_reduce" in str(error) for error in errors), errors
        assert {c.algorithm_table() for c in ranks.communicators} == {before}
        await on_all(ranks, lambda c: c.barrier())


async def test_devices_have_no_figures_from_operations(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:

        async def main(communicator: Communicator) -> None:
            if communicator.rank == 0:
                await communicator.calibrate(device=0, from_operations=True)
            else:
                await communicator.calibrate(from_operations=True)

        refused, cancelled = await on_all(ranks, main)
        assert isinstance(refused, UsageError)
        assert "leave it out" in str(refused)
        assert isinstance(cancelled, PeerCancelled)
        assert "leave it out" in str(cancelled)
        await on_all(ranks, lambda c: c.barrier())


async def test_between_several_hosts_the_slowest_lane_of_the_first_rank_counts(
    open_ranks: OpenRanks, tmp_path: Path
) -> None:
    cache = LaneCache(tmp_path / "lanes.json")
    for other, latency, bandwidth in (("b", 1e-4, 1e9), ("c", 3e-4, 2e9), ("d", 2e-4, 3e8)):
        costs = LaneCosts(latency=latency, bandwidth=bandwidth, reduction=5e9, is_measured=True)
        cache.put("a", other, "inproc", costs)
    async with open_ranks(4, hosts=("a", "b", "c", "d")) as ranks:
        await on_all(ranks, lambda c: c.calibrate(cache=tmp_path / "lanes.json"))
        found = {c.measured_lane for c in ranks.communicators}
    assert found == {LaneCosts(latency=3e-4, bandwidth=3e8, reduction=5e9, is_measured=True)}
