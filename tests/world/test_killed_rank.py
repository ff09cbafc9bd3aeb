"""A rank that is killed raises PeerLost on every survivor: they wait without a timeout, so it is noticed."""

from pathlib import Path

import pytest

from tests.soak import first
from tests.world.processes import process_world

RANKS = Path(__file__).with_name("ranks.py")


@pytest.fixture(autouse=True)
def no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let links end by silence only long after these tests: that a rank is dead is noticed, not missed."""
    monkeypatch.setenv("ASYNCPAR_LINK_TIMEOUT", "120")


@pytest.mark.process
@pytest.mark.parametrize("transport", first(2, ["shm", "grpc", "tcp"]))
@pytest.mark.parametrize("doing", first(1, ["4", "4000000", "wait"]))
async def test_every_survivor_names_the_killed_rank(tmp_path: Path, transport: str, doing: str) -> None:
    async with process_world(3, RANKS, tmp_path, doing, transport=transport) as ranks:
        assert [await rank.next() for rank in ranks] == [{"ready": True}] * 3
        ranks[2].kill()
        ends = [await rank.next() for rank in ranks[:2]]
        codes = [await rank.process.wait() for rank in ranks[:2]]
    assert [end["blamed"] for end in ends] == [2, 2]
    assert all(end["operation"] for end in ends), ends
    assert codes == [0, 0]


@pytest.mark.process
async def test_a_rank_that_is_killed_is_named_over_several_connections_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCPAR_CONNECTIONS", "3")
    async with process_world(3, RANKS, tmp_path, "4000000", transport="tcp") as ranks:
        assert [await rank.next() for rank in ranks] == [{"ready": True}] * 3
        ranks[2].kill()
        ends = [await rank.next() for rank in ranks[:2]]
    assert [end["blamed"] for end in ends] == [2, 2]


@pytest.mark.process
@pytest.mark.parametrize("victim", first(1, [0, 1, 2]))
async def test_a_rank_that_is_killed_while_hosts_reduce_together_is_named_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    """Rank 2 talks to nobody but the other rank of its own host, in the arena."""
    monkeypatch.setenv("ASYNCPAR_ALGORITHM", "all_reduce:0-inf@hierarchical")
    hosts = ["left", "right", "right"]
    async with process_world(3, RANKS, tmp_path, "4000000", hosts=hosts) as ranks:
        assert [await rank.next() for rank in ranks] == [{"ready": True}] * 3
        ranks.pop(victim).kill()
        ends = [await rank.next() for rank in ranks]
    assert [end["blamed"] for end in ends] == [victim] * 2
    assert all(end["operation"].startswith("all_reduce #") for end in ends), ends


@pytest.mark.process
@pytest.mark.parametrize("victim", first(1, [0, 1]))
async def test_a_rank_that_is_killed_before_it_comes_to_the_arena_is_named(tmp_path: Path, victim: int) -> None:
    """No launcher tells of it: its server does not listen any more."""
    script = Path(__file__).with_name("forming_ranks.py")
    async with process_world(3, script, tmp_path, str(victim)) as ranks:
        ends = [await rank.next() for rank in ranks if rank.rank != victim]
    assert [end["blamed"] for end in ends] == [victim] * 2, ends
