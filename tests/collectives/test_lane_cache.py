"""Figures of lanes are kept for the next job on the same hosts, and a file that is no good is as none."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.collectives.lane_cache import KEPT_SECONDS, LaneCache
from asyncpar.core.config.transport import LaneCosts
from asyncpar.errors import PeerCancelled, UsageError
from tests.collectives.conftest import OpenRanks, Ranks

COSTS = LaneCosts(latency=2e-4, bandwidth=1e8, reduction=5e9, is_measured=True)


async def calibrate(ranks: Ranks, cache: Path | str | bool) -> Sequence[object]:
    async def one(communicator: Communicator) -> None:
        await communicator.calibrate(cache=cache)

    async with asyncio.timeout(30.0):
        return await asyncio.gather(*map(one, ranks.communicators), return_exceptions=True)


def test_what_is_put_is_there_in_either_order_and_by_kind(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lanes.json"
    LaneCache(path).put("a", "b", "tcp", COSTS)
    assert LaneCache(path).get("b", "a", "tcp") == COSTS
    LaneCache(path).put("a", "a", "tcp*4", replace(COSTS, together=3e8))
    assert LaneCache(path).get("a", "a", "tcp*4") == replace(COSTS, together=3e8)
    assert LaneCache(path).get("a", "b", "grpc") is None
    assert LaneCache(path).get("a", "c", "tcp") is None
    assert os.listdir(path.parent) == ["lanes.json"], "no temporary file is left"


@pytest.mark.parametrize(("at", "expected"), [(1000.0, COSTS), (999.0, None), (1000.0 + KEPT_SECONDS, None)])
def test_old_figures_and_those_of_the_future_are_not_used(
    tmp_path: Path, at: float, expected: LaneCosts | None
) -> None:
    path = tmp_path / "lanes.json"
    LaneCache(path, clock=lambda: 1000.0).put("a", "b", "tcp", COSTS)
    assert LaneCache(path, clock=lambda: at).get("a", "b", "tcp") == expected


def test_the_oldest_entries_make_room(tmp_path: Path) -> None:
    path = tmp_path / "lanes.json"
    entry = {"latency": 1e-4, "bandwidth": 1e8, "reduction": 1e9}
    many = {f"a {place} tcp": {**entry, "measured_at": float(place)} for place in range(600)}
    path.write_text(json.dumps({"version": 1, "lanes": many}))
    LaneCache(path, clock=lambda: 600.0).put("a", "b", "tcp", COSTS)
    kept = json.loads(path.read_text())["lanes"]
    assert len(kept) == 512
    assert "a 599 tcp" in kept
    assert "a 1 tcp" not in kept


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"version": 2, "lanes": {}}',
        '{"version": 1, "lanes": {"a b tcp": 5}}',
        '{"version": 1, "lanes": {"a b tcp": {"latency": -1, "bandwidth": 1, "reduction": 1, "measured_at": 0}}}',
        "\x00" * 100,
    ],
)
def test_a_damaged_file_is_as_none_and_is_mended(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lanes.json"
    path.write_text(text)
    cache = LaneCache(path, clock=lambda: 1.0)
    assert cache.get("a", "b", "tcp") is None
    cache.put("a", "b", "tcp", COSTS)
    assert cache.get("a", "b", "tcp") == COSTS


def test_a_file_that_cannot_be_written_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = LaneCache(tmp_path / "file" / "lanes.json")
    cache.put("a", "b", "tcp", COSTS)
    assert cache.get("a", "b", "tcp") is None


@pytest.mark.parametrize("hosts", [("a", "a", "b", "b"), ("a", "b", "c"), ("a", "b", "a", "c"), ("a", "a")])
async def test_the_next_job_has_the_figures_of_the_one_before(
    open_ranks: OpenRanks, tmp_path: Path, hosts: tuple[str, ...]
) -> None:
    path = tmp_path / "lanes.json"
    lines = []
    for _ in range(2):
        async with open_ranks(len(hosts), hosts=hosts) as ranks:
            assert await calibrate(ranks, path) == [None] * len(hosts)
            tables = {communicator.algorithm_table() for communicator in ranks.communicators}
            assert len(tables) == 1
            lines.append(tables.pop().splitlines()[-1])
            sent = sum(links.bytes_sent for links in ranks.links)
    assert lines[0] == lines[1]
    assert "measured" in lines[0]
    assert sent < 1 << 16, "nothing large is sent where figures are known"


def test_lanes_of_a_host_are_the_latest_of_each_pair_and_the_slowest_of_other_hosts(tmp_path: Path) -> None:
    now = [1000.0]
    cache = LaneCache(tmp_path / "lanes.json", clock=lambda: now[0])

    def put(host: str, other: str, kind: str, bandwidth: float) -> None:
        cache.put(host, other, kind, LaneCosts(latency=1e-4, bandwidth=bandwidth, reduction=1e9))
        now[0] += 1.0

    put("a", "z", "tcp", 1e3)
    now[0] += KEPT_SECONDS
    for host, other, kind, bandwidth in (
        ("a", "b", "tcp", 1e6),
        ("a", "b", "grpc", 5e8),
        ("c", "a", "tcp", 2e8),
        ("b", "c", "tcp", 1e5),
        ("a", "a", "none", 4e9),
    ):
        put(host, other, kind, bandwidth)
    found = cache.of_host("a")
    assert found.within is not None
    assert found.between is not None
    assert (found.within.bandwidth, found.between.bandwidth, found.hosts) == (4e9, 2e8, 2)
    nothing = cache.of_host("nowhere")
    assert (nothing.within, nothing.between, nothing.hosts) == (None, None, 0)


async def test_more_ranks_on_a_host_are_measured(open_ranks: OpenRanks, tmp_path: Path) -> None:
    path = tmp_path / "lanes.json"
    for count in (2, 4):
        async with open_ranks(count) as ranks:
            await calibrate(ranks, path)
            assert {" together" in c.algorithm_table().splitlines()[-1] for c in ranks.communicators} == {True}
    lanes = json.loads(path.read_text())["lanes"]
    assert [name.split()[-1] for name in lanes] == ["inproc*2", "inproc*4"]
    assert all(entry["together"] > 0.0 for entry in lanes.values())


async def test_other_hosts_are_measured(open_ranks: OpenRanks, tmp_path: Path) -> None:
    path = tmp_path / "lanes.json"
    for hosts in (("a", "b"), ("a", "c")):
        async with open_ranks(2, hosts=hosts) as ranks:
            await calibrate(ranks, path)
    assert set(json.loads(path.read_text())["lanes"]) == {"a b inproc", "a c inproc"}


async def test_the_cache_of_the_user_is_in_the_usual_place(
    open_ranks: OpenRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    async with open_ranks(2, hosts=("a", "b")) as ranks:
        await calibrate(ranks, True)
    assert (tmp_path / "asyncpar" / "lanes.json").exists()


async def test_one_rank_alone_keeps_nothing(open_ranks: OpenRanks, tmp_path: Path) -> None:
    async with open_ranks(1) as ranks:
        assert await calibrate(ranks, tmp_path / "lanes.json") == [None]
    assert not (tmp_path / "lanes.json").exists()


async def test_what_is_no_path_is_refused_on_every_rank(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:

        async def main(communicator: Communicator) -> None:
            await communicator.calibrate(cache=5 if communicator.rank else "/nowhere/lanes.json")  # type: ignore[arg-type]

        async with asyncio.timeout(30.0):
            cancelled, refused = await asyncio.gather(*map(main, ranks.communicators), return_exceptions=True)
        assert isinstance(refused, UsageError)
        assert "expected the path of a file" in str(refused)
        assert isinstance(cancelled, PeerCancelled)
        await asyncio.gather(*(communicator.barrier() for communicator in ranks.communicators))
