"""Collectives and messages in one program, in real processes, and what a killed rank does to them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.world.processes import process_world

RANKS = Path(__file__).with_name("mesh_ranks.py")
pytestmark = pytest.mark.process


@pytest.mark.parametrize("transport", [None, "tcp", "grpc"])
@pytest.mark.parametrize("victim", [1, 3])
async def test_a_killed_rank_ends_the_call_on_all_ranks_and_each_says_how(
    tmp_path: Path, transport: str | None, victim: int
) -> None:
    async with process_world(4, RANKS, tmp_path, transport=transport) as ranks:
        assert await ranks[0].next() == {"ready": True}
        killed_at = time.time()
        ranks.pop(victim).kill()
        ends = [await rank.next() for rank in ranks]
        codes = [await rank.process.wait() for rank in ranks]
    driver, *others = ends
    assert driver["at"] - killed_at < 2.0
    assert driver["ranks"] == [0, 1, 2, 3]
    assert driver["arrived"] == 0
    assert driver["kinds"][victim] == "asyncpar.errors.PeerLost"
    assert set(driver["kinds"]) <= {"asyncpar.errors.PeerLost", "asyncpar.errors.PeerCancelled"}
    assert driver["notes"] == ["from rank 3 at dp=1, tp=1 of a mesh of dp 2 x tp 2"]
    assert [end["blamed"] for end in others] == [victim] * 2
    assert codes == [0, 0, 0]
