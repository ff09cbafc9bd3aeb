"""Figures of lanes are kept for the next job on the same hosts, and a file that is no good is as none."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
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


@pytest.mark.parametrize("hosts", [("a", "a", "b", "b"), ("a", "b", "c"), ("a", "a")])
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
            told, refused = await asyncio.gather(*map(main, ranks.communicators), return_exceptions=True)
        assert isinstance(refused, UsageError)
        assert "expected the path of a file" in str(refused)
        assert isinstance(told, PeerCancelled)
        await asyncio.gather(*(communicator.barrier() for communicator in ranks.communicators))
