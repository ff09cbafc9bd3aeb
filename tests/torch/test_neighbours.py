"""Ranks that wait for the world notice at once when a process of their host ends, or is stopped."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

from asyncpar.errors import LaunchError, PeerLost
from asyncpar.net.membership.host import ProcessMark, process_mark
from asyncpar.torch.rendezvous import neighbours
from asyncpar.torch.rendezvous.messages import RankHello, encode
from asyncpar.torch.rendezvous.neighbours import Neighbour, Neighbours
from asyncpar.torch.rendezvous.store import RendezvousStore
from tests.net.membership.test_host import Child
from tests.torch.rendezvous_ranks import outcomes, seen, start


@pytest.fixture
def child() -> Iterator[Child]:
    with Child() as one:
        yield one


def own() -> ProcessMark:
    mark = process_mark()
    assert mark is not None
    return mark


@pytest.fixture(autouse=True)
def _always_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "CHECK_SECONDS", 0.0)


def announce(store: Any, rank: int, process: ProcessMark, *, attempt: int = 0) -> Neighbours:
    return Neighbours(RendezvousStore(store, 1), Neighbour(rank=rank, process=process, attempt=attempt))


@pytest.mark.parametrize("is_reaped", [False, True])
def test_a_rank_whose_process_ends_is_found(child: Child, *, is_reaped: bool) -> None:
    store = dist.HashStore()
    mine = announce(store, 0, own())
    announce(store, 1, own())
    announce(store, 2, child.mark)
    assert mine.check() is None
    child.kill(is_reaped=is_reaped)
    assert mine.check() == mine.find_ended() == 2


def test_what_ended_before_a_restart_does_not_count(child: Child) -> None:
    store = dist.HashStore()
    announce(store, 1, child.mark, attempt=0)
    child.kill(is_reaped=True)
    assert announce(store, 0, own(), attempt=1).check() is None
    assert announce(store, 0, own(), attempt=0).check() == 1


def test_processes_of_other_places_are_nobodys_business(child: Child) -> None:
    store = dist.HashStore()
    elsewhere = ProcessMark(place="another", pid=child.mark.pid, started=1)
    announce(store, 1, elsewhere)
    assert announce(store, 0, own()).check() is None


def test_a_process_that_sees_no_other_asks_nobody() -> None:
    mine = Neighbours(RendezvousStore(None, 1), None)
    assert mine.check() is None
    assert mine.find_ended() is None


def test_an_announcement_that_is_half_written_is_read_later(child: Child) -> None:
    store = dist.HashStore()
    mine = announce(store, 0, own())
    store.add(f"asyncpar/1/{own().place}/count", 1)
    assert mine.check() is None
    announce(store, 2, own())
    late = Neighbour(rank=1, process=child.mark, attempt=0)
    store.set(f"asyncpar/1/{own().place}/2", msgspec.json.encode(late).decode())
    assert mine.check() is None
    child.kill(is_reaped=True)
    assert mine.check() == 1


def test_a_stopped_rank_is_told_of_once(child: Child, caplog: pytest.LogCaptureFixture) -> None:
    store = dist.HashStore()
    mine = announce(store, 0, own())
    announce(store, 1, child.mark)
    assert mine.check() is None
    child.stop()
    with caplog.at_level(logging.WARNING):
        assert mine.check() is None
        assert mine.check() is None
    assert [record.getMessage() for record in caplog.records] == [
        f"rank 0 waits for rank 1, which is stopped (process {child.mark.pid})"
    ]


@pytest.mark.parametrize("has_sent_hello", [False, True])
async def test_a_rank_that_ends_before_the_world_is_complete_is_named_on_all_at_once(
    child: Child, *, has_sent_hello: bool
) -> None:
    store = dist.HashStore()
    there = RendezvousStore(dist.PrefixStore("default_pg", store), 1)
    Neighbours(there, Neighbour(rank=1, process=child.mark, attempt=0))
    waiting = [start(store, 0, 3), start(store, 2, 3)]
    await seen(store, "asyncpar/1/hello/0", "asyncpar/1/hello/2")
    if has_sent_hello:
        there.put("hello", 1, encode(replace(there.message("hello", 0, RankHello), rank=1)))
        await seen(store, "asyncpar/1/address/0", "asyncpar/1/address/2")
    child.kill(is_reaped=True)
    errors = await outcomes(*waiting)
    assert [type(error) for error in errors] == [PeerLost] * 2
    assert {error.rank for error in errors} == {1}
    assert str(errors[0]) == "rank 0: no world was formed: the process of rank 1 ended before the world was complete"


class Breaking:
    """A store that goes away with the process that holds it."""

    def __init__(self, store: Any) -> None:
        self.is_gone = False
        self._store = store

    def __getattr__(self, name: str) -> Any:
        if self.is_gone:
            raise RuntimeError("Connection reset by peer")
        return getattr(self._store, name)


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_store_that_goes_with_the_rank_that_held_it_names_that_rank(
    child: Child, monkeypatch: pytest.MonkeyPatch, *, is_killed: bool
) -> None:
    monkeypatch.setattr(dist, "PrefixStore", lambda _, store: store)
    store = Breaking(dist.HashStore())
    Neighbours(RendezvousStore(store, 1), Neighbour(rank=0, process=child.mark, attempt=0))
    waiting = start(store, 1, 3)
    await seen(store, "asyncpar/1/hello/1")
    store.is_gone = True
    if is_killed:
        child.kill(is_reaped=False)
    (error,) = await outcomes(waiting)
    if is_killed:
        assert isinstance(error, PeerLost)
        assert error.rank == 0
    else:
        assert isinstance(error, LaunchError)
        assert "Connection reset by peer" in str(error)
