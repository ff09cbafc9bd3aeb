"""Nodes that meet through stores of torch, in one process on one loop."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from asyncpar.blocking.thread import LoopThread
from asyncpar.errors import LaunchError, PeerLost, PeerTimeout, UsageError
from asyncpar.node import start_node
from asyncpar.torch.rendezvous.attach import attach_store
from asyncpar.torch.rendezvous.messages import RankClaim, RankHello, WorldIdentity, encode
from asyncpar.torch.rendezvous.rendezvous import StoreRendezvous
from asyncpar.torch.rendezvous.store import RendezvousStore
from tests.torch.rendezvous_ranks import LONG, SOON, no_threads_left, outcomes, seen, start, total, world


@pytest.fixture(params=["HashStore", "FileStore", "TCPStore"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    match request.param:
        case "HashStore":
            return dist.HashStore()
        case "FileStore":
            return dist.FileStore(str(tmp_path / "store"), -1)
        case _:
            return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


async def test_the_ranks_of_a_process_find_each_other_through_any_store(store: Any) -> None:
    async with world(store, 3) as nodes:
        assert [node.rank for node in nodes] == [0, 1, 2]
        assert await total(nodes) == 6.0


async def test_more_ranks_than_processors_share_memory_in_one_process() -> None:
    async with world(dist.HashStore(), 8) as nodes:
        assert await total(nodes) == 36.0
        assert all(node.has_arena for node in nodes)
        assert [member.local_rank for member in nodes[0].membership.members] == list(range(8))
        assert {member.address.partition(":")[0] for member in nodes[0].membership.members} == {"127.0.0.1"}


async def test_a_world_of_one_needs_nobody() -> None:
    async with world(dist.HashStore(), 1) as nodes:
        assert await total(nodes) == 1.0


async def test_one_store_serves_world_after_world(store: Any) -> None:
    jobs = set()
    for generation in (1, 2, 3):
        async with world(store, 2) as nodes:
            assert await total(nodes) == 3.0
            assert {node.membership.generation for node in nodes} == {generation}
            jobs.add(nodes[0].membership.job)
    assert len(jobs) == 3
    await no_threads_left()


async def test_ranks_that_do_not_come_are_named_by_all_who_did(store: Any) -> None:
    errors = await outcomes(start(store, 0, 4, timeout=0.5), start(store, 1, 4, timeout=0.5))
    assert [str(error) for error in errors] == [
        "rank 0: ranks 2 and 3 of 4 have not come within 0.5 s",
        "rank 1: ranks 2 and 3 of 4 have not come within 0.5 s",
    ]
    assert all(isinstance(error, PeerTimeout) and error.rank == 2 for error in errors)
    await no_threads_left()


async def test_without_rank_0_the_others_name_it() -> None:
    (error,) = await outcomes(start(dist.HashStore(), 1, 2, timeout=0.2))
    assert str(error) == "rank 1: rank 0 of 2 has not come within 0.2 s"


async def test_who_comes_too_late_is_told_at_once_and_the_next_time_all_meet() -> None:
    store = dist.HashStore()
    await outcomes(start(store, 0, 2, timeout=0.2))
    (late,) = await outcomes(start(store, 1, 2))
    assert isinstance(late, PeerTimeout)
    assert str(late) == "rank 1 came too late: rank 1 of 2 has not come within 0.2 s"
    async with world(store, 2) as nodes:
        assert await total(nodes) == 3.0


async def test_who_comes_too_late_joins_those_who_try_again() -> None:
    store = dist.HashStore()
    await outcomes(start(store, 0, 2, timeout=0.1))
    again = start(store, 0, 2)
    await seen(store, "asyncpar/2/claim/0")
    async with asyncio.timeout(SOON):
        nodes = await asyncio.gather(again, start(store, 1, 2))
    assert await total(nodes) == 3.0
    await asyncio.gather(*(node.stop() for node in nodes))


async def test_a_rank_that_waits_in_a_later_rendezvous_than_the_rest_says_so() -> None:
    store = dist.HashStore()
    async with world(store, 2):
        pass
    (error,) = await outcomes(start(store, 0, 2, timeout=0.1))
    assert str(error) == "rank 0: rank 1 of 2 has not come within 0.1 s (in rendezvous 2 of this store)"


async def test_different_settings_name_both_ranks_at_once_on_all() -> None:
    store = dist.HashStore()
    other = {"ASYNCPAR_ARENA_BYTES": "1M"}
    errors = await outcomes(start(store, 0, 3), start(store, 1, 3), start(store, 2, 3, environment=other))
    expected = (
        "settings: rank 0 has transport=any, arena=8388608, rank 2 has transport=any, arena=1048576; "
        "it must be equal on all ranks"
    )
    assert [str(error) for error in errors] == [expected] * 3
    assert all(isinstance(error, UsageError) for error in errors)
    await no_threads_left()


async def test_different_sizes_name_both_ranks() -> None:
    store = dist.HashStore()
    errors = await outcomes(start(store, 0, 2), start(store, 1, 3))
    assert {str(error) for error in errors} == {"world_size: rank 0 has 2, rank 1 has 3; it must be equal on all ranks"}


async def test_a_rank_beyond_the_size_that_others_have_is_refused() -> None:
    store = dist.HashStore()
    async with world(store, 2):
        (error,) = await outcomes(start(store, 2, 3))
    assert isinstance(error, UsageError)
    assert str(error) == "world_size: the others are 2, rank 2 came as one of 3"


async def test_a_rank_that_is_there_twice_is_refused_on_all() -> None:
    store = dist.HashStore()
    waiting = [start(store, 0, 3), start(store, 1, 3)]
    await seen(store, "asyncpar/1/hello/0", "asyncpar/1/hello/1")
    errors = await outcomes(*waiting, start(store, 1, 3))
    assert all(isinstance(error, UsageError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert str(errors[0]).startswith("rank: 1 came twice, as process ")


async def test_a_rank_that_died_while_it_waited_may_come_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncpar.torch.rendezvous.rendezvous.ANSWER_SECONDS", 0.05)
    store = dist.HashStore()
    dead = RendezvousStore(dist.PrefixStore("default_pg", store), 1)
    dead.claim(0, RankClaim(token="dead", name="process 1 on a", attempt=0))
    dead.put("hello", 0, encode(RankHello(rank=0, host="a", host_id="a", terms={})))
    async with world(store, 3) as nodes:
        assert await total(nodes) == 6.0
        assert nodes[0].membership.generation == 2


async def test_ranks_that_wait_where_another_died_go_on_with_its_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncpar.torch.rendezvous.rendezvous.ANSWER_SECONDS", 0.05)
    store = dist.HashStore()
    dead = RendezvousStore(dist.PrefixStore("default_pg", store), 1)
    dead.claim(0, RankClaim(token="dead", name="process 1 on a", attempt=0))
    waiting = start(store, 1, 2)
    await seen(store, "asyncpar/1/hello/1")
    async with asyncio.timeout(SOON):
        nodes = await asyncio.gather(start(store, 0, 2), waiting)
    assert await total(nodes) == 3.0
    await asyncio.gather(*(node.stop() for node in nodes))


async def test_ends_of_ranks_before_they_were_started_anew_are_no_news() -> None:
    store = dist.HashStore()
    await outcomes(start(store, 0, 2, timeout=0.1))
    async with world(store, 2, [{"TORCHELASTIC_RESTART_COUNT": "1"}] * 2) as nodes:
        assert await total(nodes) == 3.0


async def test_a_rank_that_fails_tells_the_others_why() -> None:
    store = dist.HashStore()
    failing = start(store, 1, 3, environment={"ASYNCPAR_ARENA_BYTES": "fish"})
    first, failed, third = await outcomes(start(store, 0, 3), failing, start(store, 2, 3))
    assert isinstance(failed, UsageError)
    for error in (first, third):
        assert isinstance(error, PeerLost)
        assert error.rank == 1
        assert "rank 1 gave up: UsageError: ASYNCPAR_ARENA_BYTES: expected a size" in str(error)
    await no_threads_left()


async def test_a_rank_whose_server_cannot_be_bound_tells_the_others_why() -> None:
    store = dist.HashStore()
    failing = start(store, 1, 2, environment={"ASYNCPAR_BIND": "203.0.113.7"})
    first, failed = await outcomes(start(store, 0, 2), failing)
    assert isinstance(failed, UsageError)
    assert isinstance(first, PeerLost)
    assert "rank 1 gave up: UsageError: 203.0.113.7:0 cannot be bound" in str(first)


def test_a_rank_that_dies_after_it_was_seen_is_named_long_before_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncpar.torch.rendezvous.rendezvous.EXCHANGE_SECONDS", 0.1)
    store = dist.HashStore()
    second = RendezvousStore(store, 1)
    second.claim(1, RankClaim(token="dead", name="process 1 on a", attempt=0))
    second.put("hello", 1, encode(RankHello(rank=1, host="a", host_id="a", terms={})))
    first = StoreRendezvous(store, rank=0, size=2, timeout=LONG)
    first.enter("process 2 on b")
    participants = first.wait_for_ranks(
        RankHello(rank=0, host="b", host_id="b", terms={}), WorldIdentity(job="job", generation=0)
    )
    with pytest.raises(PeerTimeout, match=r"rank 0: rank 1 of 2 has not published its address within 0\.1 s"):
        first.exchange(participants, "127.0.0.1:1")


async def test_a_rank_that_is_cancelled_ends_at_once_and_so_do_the_others() -> None:
    store = dist.HashStore()
    tasks = [start(store, 0, 3), start(store, 1, 3)]
    await seen(store, "asyncpar/1/hello/0", "asyncpar/1/hello/1")
    tasks[1].cancel()
    first, cancelled = await outcomes(*tasks)
    assert isinstance(cancelled, asyncio.CancelledError)
    assert isinstance(first, PeerLost)
    assert str(first) == "rank 0: no world was formed: rank 1 gave up: CancelledError"
    await no_threads_left()


class HungStore:
    """A store that does not answer until the test lets it."""

    def __init__(self) -> None:
        self.answers = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.answers.wait()
        raise RuntimeError("no longer there")


async def test_a_store_that_hangs_keeps_nobody_from_cancelling() -> None:
    store = HungStore()
    attach = attach_store(store, rank=1, size=2, timeout=LONG, environment={})
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await start_node(attach)
    finally:
        store.answers.set()
    await no_threads_left()


async def test_a_store_that_hangs_is_given_up_shortly_after_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncpar.torch.rendezvous.attach._STORE_MARGIN", 0.05)
    store = HungStore()
    try:
        with pytest.raises(LaunchError, match=r"rank 1: the store has not answered for 0\.1 s"):
            await start_node(attach_store(store, rank=1, size=2, timeout=0.1, environment={}))
    finally:
        store.answers.set()
    await no_threads_left()


async def test_a_store_that_fails_is_quoted() -> None:
    store = HungStore()
    store.answers.set()
    with pytest.raises(LaunchError, match="rank 1: the store that the 2 ranks meet through failed: no longer there"):
        await start_node(attach_store(store, rank=1, size=2, timeout=LONG, environment={}))


def test_worlds_that_come_and_go_on_a_loop_of_its_own_thread_leave_no_errors(caplog: pytest.LogCaptureFixture) -> None:
    thread = LoopThread()
    store = dist.HashStore()
    try:
        for _ in range(40):
            node = thread.call(lambda: start_node(attach_store(store, rank=0, size=1, timeout=LONG, environment={})))
            thread.call(node.stop)
            del node
    finally:
        thread.close()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


# -- arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "size", "timeout", "message"),
    [
        (0, 0, 1.0, "world_size: expected at least 1, got 0"),
        (2, 2, 1.0, r"rank: expected 0\.\.1, got 2"),
        (-1, 2, 1.0, r"rank: expected 0\.\.1, got -1"),
        (0, 1, 0.0, r"timeout: expected a positive number of seconds, got 0\.0"),
        (0, 1, float("inf"), "timeout: expected a positive number of seconds, got inf"),
    ],
)
def test_what_makes_no_sense_is_refused(rank: int, size: int, timeout: float, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        attach_store(dist.HashStore(), rank=rank, size=size, timeout=timeout)
