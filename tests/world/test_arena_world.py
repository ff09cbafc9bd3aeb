"""Real processes in an arena: a great many small operations, and what kills leave behind.

``--soak`` runs a million operations in place of some thousand.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest

from tests.net.arena.test_processes import memory_files
from tests.shared_files import left_behind, shared_files
from tests.soak import chosen
from tests.world.processes import process_world

RANKS = Path(__file__).with_name("arena_ranks.py")
pytestmark = pytest.mark.process
STARTS = chosen(1, soak=2)
"""Which one of three worlds is killed while it starts."""


@pytest.mark.timeout(300)
async def test_very_many_small_operations_lose_no_wake_up(tmp_path: Path) -> None:
    polled, awaited = chosen((1_500, 2_000), soak=(800_000, 200_000))
    async with process_world(2, RANKS, tmp_path, "often", str(polled), str(awaited)) as ranks:
        ends = [await rank.next() for rank in ranks]
    assert [end["done"] for end in ends] == [polled + awaited] * 2
    assert [end["rescues"] for end in ends] == [0, 0]
    assert all(end["rings"] > awaited // 10 for end in ends), "sleeping was not tried"


@pytest.mark.timeout(300)
async def test_more_ranks_than_cores_lose_no_wake_up(tmp_path: Path) -> None:
    count = chosen(300, soak=20_000)
    async with process_world(4, RANKS, tmp_path, "often", "0", str(count)) as ranks:
        ends = [await rank.next() for rank in ranks]
    assert [end["rescues"] for end in ends] == [0] * 4


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(chosen(1, soak=4)))
async def test_killed_ranks_leave_nothing_in_shared_memory(tmp_path: Path, seed: int) -> None:
    """At random moments while worlds form and work, of some ranks one after another, or of all at once."""
    chance = random.Random(seed)
    before = shared_files()
    for world in range(chosen(2, soak=3 + (seed == 0))):
        async with process_world(4, RANKS, tmp_path, "all sorts") as ranks:
            if world % 3 == STARTS:  # while it starts and forms
                await asyncio.sleep(chance.uniform(*chosen((0.0, 0.1), soak=(0.3, 1.0))))
            else:
                first = [await rank.next() for rank in ranks]
                assert first == [{"ready": True, "has_arena": True}] * 4
                await asyncio.sleep(chance.uniform(0.0, 0.05))
            segments = set().union(*(memory_files(rank.process.pid) for rank in ranks))
            assert segments or world % 3 == STARTS
            order = chance.sample(ranks, 4)
            for rank in order:
                rank.kill()
                if world % 2:
                    await asyncio.sleep(chance.uniform(0.0, 0.02))
            for rank in order:
                await rank.process.wait()
            deadline = time.monotonic() + 30.0
            while memory_files() & segments:
                assert time.monotonic() < deadline, "segments are left"
                await asyncio.sleep(0.01)
        assert not left_behind(before)
