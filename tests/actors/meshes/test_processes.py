"""Collectives and messages in one program, in real processes, and what a killed rank does to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import first
from tests.world.processes import process_world

RANKS = Path(__file__).with_name("mesh_ranks.py")
ENDED = ("its process ended", "the peer closed the ", "the connection broke: ", "the stream broke: ")
"""How the causes of a loss begin that is noticed because a process has ended."""
pytestmark = pytest.mark.process


@pytest.mark.parametrize("transport", first(1, [None, "tcp", "grpc"]))
@pytest.mark.parametrize("victim", first(1, [1, 3]))
async def test_a_killed_rank_ends_the_call_and_each_rank_says_how(
    tmp_path: Path, transport: str | None, victim: int
) -> None:
    async with process_world(4, RANKS, tmp_path, transport=transport) as ranks:
        assert await ranks[0].next() == {"ready": True}
        ranks.pop(victim).kill()
        ends = [await rank.next() for rank in ranks]
        codes = [await rank.process.wait() for rank in ranks]
    driver, *others = ends
    failed = driver["ranks"]
    kinds = dict(zip(failed, driver["kinds"], strict=True))
    assert kinds.pop(victim) == "asyncpar.errors.PeerLost"
    assert set(kinds.values()) <= {"asyncpar.errors.PeerLost", "asyncpar.errors.PeerCancelled"}
    assert driver["arrived"] == 4 - len(failed)  # the victim may have done its part for some of the others
    dp, tp = divmod(failed[-1], 2)
    assert driver["notes"][-1:] == [f"from rank {failed[-1]} at dp={dp}, tp={tp} of a mesh of dp 2 x tp 2"]
    assert [end["blamed"] for end in others] == [victim] * 2
    for end in others:  # at once: none of them has waited until it had received nothing for long
        assert end["cause"].startswith(ENDED), end["cause"]
        assert "timeout" not in end["cause"]
    assert codes == [0, 0, 0]
