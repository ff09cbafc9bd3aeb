"""Watching actors: exactly one Down, whatever happens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.actors.runtime.ending import Down, DownReason
from asyncpar.errors import PeerLost, RemoteError, UsageError


class Worker(Actor):
    @endpoint
    async def work(self) -> str:
        return "done"

    @endpoint
    async def fail(self, text: str) -> None:
        raise ValueError(text)

    @endpoint
    async def finish(self) -> None:
        self.stop_self()


class Observer(Actor):
    """Watches on request and keeps the ends that it receives."""

    def __init__(self) -> None:
        self.log: list[object] = []
        self.gate = asyncio.Event()

    @endpoint
    async def observe(self, target: Worker) -> None:
        self.watch(target)

    @endpoint
    async def hold(self) -> None:
        await self.gate.wait()

    @endpoint
    async def note(self, text: str) -> None:
        self.log.append(text)

    async def on_down(self, down: Down) -> None:
        self.log.append(down.reason)


@pytest.fixture(params=[0, 1], ids=["same rank", "other rank"])
def home(request: pytest.FixtureRequest) -> int:
    """The rank of the watched actor; rank 0 watches."""
    rank: int = request.param
    return rank


@pytest.mark.promise("watch-once")
async def test_a_stopped_actor_gives_one_down(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Worker, name="w")
        ref = ranks.systems[0].ref("w", rank=home)
        received: list[Down] = []
        watch = ranks.systems[0].watch(ref, received.append)
        await ranks.systems[0].stop(ref)
        assert await watch == Down(ref, DownReason.STOPPED)
        assert await watch is watch.down, "awaiting it again gives the same"
        assert received == [watch.down]


async def test_an_actor_that_stops_itself_is_stopped(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Worker, name="w")
        ref = ranks.systems[0].ref("w", rank=home)
        watch = ranks.systems[0].watch(ref)
        await ref.finish()
        assert (await watch).reason is DownReason.STOPPED


async def test_a_failed_actor_notifies_its_watchers_of_the_reason(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Worker, name="w")
        ref = ranks.systems[0].ref("w", rank=home)
        watch = ranks.systems[0].watch(ref)
        ref.fail.tell("no luck")
        down = await watch
        assert down.reason is DownReason.FAILED
        assert isinstance(down.error, RemoteError)
        assert (down.error.rank, down.error.type_name, down.error.message) == (home, "ValueError", "no luck")
        assert "raise ValueError(text)" in down.error.remote_traceback


async def test_a_killed_actor_is_down_as_killed(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Worker, name="w")
        ref = ranks.systems[0].ref("w", rank=home)
        watch = ranks.systems[0].watch(ref)
        await ranks.systems[0].kill(ref)
        assert (await watch).reason is DownReason.KILLED


async def test_an_actor_that_is_not_there_is_missing(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        assert (await ranks.systems[0].watch(ranks.systems[0].ref("w", rank=home))).reason is DownReason.MISSING


@pytest.mark.promise("watch-node")
async def test_the_actors_of_a_killed_rank_are_lost(open_ranks: Any) -> None:
    async with open_ranks(3) as ranks:
        await ranks.systems[1].spawn(Worker, name="w")
        ref = ranks.systems[0].ref("w", rank=1)
        assert await ref.work() == "done"
        watches = [ranks.systems[0].watch(ref) for _ in range(3)]
        ranks.kill(1)
        for watch in watches:
            down = await watch
            assert down.reason is DownReason.LOST
            assert isinstance(down.error, PeerLost)
            assert down.error.rank == 1
        late = await ranks.systems[0].watch(ref)
        assert late.reason is DownReason.LOST


async def test_the_actors_of_a_closed_node_are_closed(open_ranks: Any) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[1].spawn(Worker, name="w")
        watch = ranks.systems[0].watch(ranks.systems[0].ref("w", rank=1))
        await ranks.systems[0].ref("w", rank=1).work()
        await ranks.systems[1].close()
        assert (await watch).reason is DownReason.CLOSED


async def test_watches_end_when_their_own_node_closes(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Worker, name="w")
        waiting = asyncio.ensure_future(_wait(ranks.systems[0].watch(ranks.systems[0].ref("w", rank=home))))
        await asyncio.sleep(0)
        await ranks.systems[0].close()
        assert (await waiting).reason is DownReason.CLOSED


async def test_a_cancelled_watch_receives_nothing(open_ranks: Any, home: int) -> None:
    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Worker, name="w")
        ref = ranks.systems[0].ref("w", rank=home)
        received: list[Down] = []
        watch = ranks.systems[0].watch(ref, received.append)
        waiting = asyncio.ensure_future(_wait(watch))
        await asyncio.sleep(0)
        watch.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled()
        await ranks.systems[0].stop(ref)
        assert (received, watch.down) == ([], None)


@pytest.mark.promise("priority-supervision")
async def test_an_actor_learns_of_an_end_before_messages_that_wait(open_ranks: Any, home: int) -> None:
    observers: list[Observer] = []

    class Seen(Observer):
        async def on_start(self) -> None:
            observers.append(self)

    async with open_ranks(2) as ranks:
        await ranks.systems[home].spawn(Worker, name="w")
        target = ranks.systems[0].ref("w", rank=home)
        ref = await ranks.systems[0].spawn(Seen, name="o")
        await ref.observe(target)
        holding = asyncio.create_task(ref.hold())
        noting = [asyncio.create_task(ref.note(text)) for text in ("first", "second")]
        await asyncio.sleep(0)
        await ranks.systems[0].stop(target)
        probe = ranks.systems[0].watch(target)  # its answer comes behind the Down
        await probe
        observers[0].gate.set()
        await asyncio.gather(holding, *noting)
        assert observers[0].log == [DownReason.STOPPED, "first", "second"]


async def test_only_references_can_be_watched(open_ranks: Any) -> None:
    async with open_ranks(1) as ranks:
        with pytest.raises(UsageError, match=r"ref: expected the reference of an actor .*, got 'w'"):
            ranks.systems[0].watch("w")


async def _wait(watch: Any) -> Down:
    down: Down = await watch
    return down
