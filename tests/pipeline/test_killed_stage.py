"""A stage whose process is killed ends the run on every other rank, with its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.world.processes import process_world

RANKS = Path(__file__).with_name("pipeline_ranks.py")


@pytest.mark.process
async def test_every_survivor_names_the_killed_stage(tmp_path: Path) -> None:
    async with process_world(3, RANKS, tmp_path) as ranks:
        assert [await rank.next() for rank in ranks] == [{"ready": True}] * 3
        ranks[1].kill()
        survivors = [ranks[0], ranks[2]]
        ends = [await rank.next() for rank in survivors]
        codes = [await rank.process.wait() for rank in survivors]
    assert [end["blamed"] for end in ends] == [1, 1], ends
    assert codes == [0, 0]
