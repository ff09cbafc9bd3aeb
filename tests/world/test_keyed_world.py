"""Real processes whose operations have keys: no wake-up is lost, and a killed rank is noticed by all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import chosen, first
from tests.world.processes import process_world

RANKS = Path(__file__).with_name("keyed_ranks.py")
pytestmark = pytest.mark.process


@pytest.mark.timeout(300)
@pytest.mark.parametrize("wait", ["poll", "doorbell"])
@pytest.mark.parametrize(
    ("size", "steps", "sizes"),
    chosen([(3, 120, "small")], soak=[(3, 1000, "small"), (2, 100, "all"), (2, 4000, "small")]),
)
async def test_keys_in_any_order_lose_no_wake_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, steps: int, sizes: str, wait: str
) -> None:
    monkeypatch.setenv("ASYNCPAR_ARENA_WAIT", wait)
    async with process_world(size, RANKS, tmp_path, str(steps), sizes) as ranks:
        assert [await rank.next() for rank in ranks] == [{"ready": True}] * size
        ends = [await rank.next() for rank in ranks]
    assert ends == [{"rescues": 0, "algorithms": ["arena"]}] * size


@pytest.mark.parametrize("victim", first(1, [0, 1, 2]))
async def test_when_a_rank_is_killed_the_others_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    monkeypatch.setenv("ASYNCPAR_LINK_TIMEOUT", "120")  # silence ends no link of this test
    async with process_world(3, RANKS, tmp_path, "1000000", "all") as ranks:
        assert [await rank.next() for rank in ranks] == [{"ready": True}] * 3
        ranks[victim].kill()
        ends = [await rank.next() for rank in ranks if rank.rank != victim]
        codes = [await rank.process.wait() for rank in ranks if rank.rank != victim]
    assert [end["blamed"] for end in ends] == [victim] * 2
    assert codes == [0, 0]
