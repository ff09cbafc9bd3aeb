"""A replica whose process is killed raises PeerLost on every other, whether it averages or exchanges updates."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import first
from tests.world.processes import process_world

RANKS = Path(__file__).with_name("training_ranks.py")


@pytest.mark.process
@pytest.mark.parametrize("mode", first(1, ["synchronous", "bounded"]))
async def test_every_survivor_names_the_killed_replica(tmp_path: Path, mode: str) -> None:
    async with process_world(3, RANKS, tmp_path, mode) as ranks:
        assert [await rank.next() for rank in ranks] == [{"ready": True}] * 3
        ranks[1].kill()
        survivors = [ranks[0], ranks[2]]
        ends = [await rank.next() for rank in survivors]
        codes = [await rank.process.wait() for rank in survivors]
    assert [end["blamed"] for end in ends] == [1, 1]
    assert all(end["operation"] for end in ends), ends
    assert codes == [0, 0]
