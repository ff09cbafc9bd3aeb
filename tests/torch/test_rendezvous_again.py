"""Ranks that are started anew while some of them were in a rendezvous: one that died there holds nobody up."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from asyncpar.errors import PeerTimeout
from asyncpar.torch.rendezvous.messages import RankClaim, RankHello, RendezvousResult, WorldIdentity, abandoned, encode
from asyncpar.torch.rendezvous.rendezvous import RendezvousAbandoned, StoreRendezvous
from asyncpar.torch.rendezvous.store import RendezvousStore
from tests.torch.rendezvous_ranks import total, world

HOUR = 3600.0
CHARTER = WorldIdentity(job="job", generation=0)


def hello(rank: int, *, attempt: int = 0) -> RankHello:
    return RankHello(rank=rank, host="a", host_id="a", terms={}, attempt=attempt)


def leave_traces(board: RendezvousStore, rank: int, *, attempt: int = 0, known: RankHello | None = None) -> None:
    """Leave on ``board`` the traces of a rank that was killed while it waited."""
    board.claim(rank, RankClaim(token="dead", name="process 1 on a", attempt=attempt))
    board.put("hello", rank, encode(known or hello(rank, attempt=attempt)))


async def hello_of_nodes(rank: int, size: int) -> RankHello:
    """Return the hello of a node as ``rank``: it has all that must be equal on all of them."""
    store = dist.HashStore()
    async with world(store, size):
        return RendezvousStore(dist.PrefixStore("default_pg", store), 1).message("hello", rank, RankHello)


class QuickClock:
    """A second passes whenever somebody looks at it, a minute in each pause of a rendezvous."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def _quick_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = QuickClock()

    def pause(_: StoreRendezvous, __: float) -> None:
        clock.now += 60.0

    monkeypatch.setattr("asyncpar.torch.rendezvous.rendezvous.time", clock)
    monkeypatch.setattr(StoreRendezvous, "_pause", pause)


async def test_a_restarted_rank_writes_no_duplicate_notice_where_it_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asyncpar.torch.rendezvous.rendezvous.ANSWER_SECONDS", HOUR)
    store = dist.HashStore()
    for rank in range(2):
        leave_traces(RendezvousStore(dist.PrefixStore("default_pg", store), 1), rank)
    async with world(store, 2, [{"TORCHELASTIC_RESTART_COUNT": "1"}] * 2) as nodes:
        assert await total(nodes) == 3.0
        assert nodes[0].membership.generation == 2


async def test_agents_that_count_restarts_differently_do_not_keep_ranks_apart() -> None:
    store = dist.HashStore()
    known = await hello_of_nodes(1, 2)  # rank 0 may read it, and compares it with its own
    leave_traces(RendezvousStore(dist.PrefixStore("default_pg", store), 1), 1, known=known)
    async with world(store, 2, [{}, {"TORCHELASTIC_RESTART_COUNT": "1"}]) as nodes:
        assert await total(nodes) == 3.0


@pytest.mark.usefixtures("_quick_hour")
def test_who_has_waited_for_a_dead_rank_has_all_the_time_for_its_successor() -> None:
    store = dist.HashStore()
    board = RendezvousStore(store, 1)
    leave_traces(board, 1)
    first = StoreRendezvous(store, rank=0, size=2, timeout=HOUR)
    first.enter("process 2 on a")
    participants = first.wait_for_ranks(hello(0), CHARTER)
    board.write_end(RendezvousResult(failure=abandoned(1)))
    with pytest.raises(RendezvousAbandoned):
        first.exchange(participants, "127.0.0.1:1")
    first.enter("process 2 on a")
    with pytest.raises(PeerTimeout, match=r"rank 1 of 2 has not come within 3600\.0 s"):
        first.wait_for_ranks(hello(0), CHARTER)


@pytest.mark.usefixtures("_quick_hour")
def test_who_was_started_anew_gives_others_all_the_time_to_come_anew_too() -> None:
    store = dist.HashStore()
    leave_traces(RendezvousStore(store, 1), 1)
    first = StoreRendezvous(store, rank=0, size=2, timeout=HOUR, attempt=1)
    first.enter("process 2 on a")
    participants = first.wait_for_ranks(hello(0), CHARTER)
    with pytest.raises(PeerTimeout, match=r"rank 1 of 2 has not published its address within 3600\.0 s"):
        first.exchange(participants, "127.0.0.1:1")
