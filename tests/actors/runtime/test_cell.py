"""The life of an actor: start, one message at a time, stop."""

from __future__ import annotations

import asyncio
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.actors.runtime.mailbox import BURST
from asyncpar.actors.runtime.ref import ActorRef
from asyncpar.errors import ActorDown, AsyncparError, NodeClosed, PeerCancelled, PeerLost, RemoteError, UsageError


class Log(list[str]):
    """A list that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = asyncio.Event()

    def append(self, text: str) -> None:
        super().append(text)
        self._changed.set()

    async def shows(self, text: str) -> None:
        while text not in self:
            self._changed.clear()
            await self._changed.wait()


class Recorder(Actor):
    """Notes what happens to it in a list that the test holds: constructor arguments are not copied."""

    def __init__(self, log: Log, label: str = "it", gate: asyncio.Event | None = None) -> None:
        self.log = log
        self.label = label
        self.gate = gate or asyncio.Event()
        self.entered = asyncio.Event()

    async def on_start(self) -> None:
        self.log.append(f"{self.label} starts as {self.ref.name}")

    async def on_stop(self) -> None:
        self.log.append(f"{self.label} stops")

    @endpoint
    async def note(self, text: str) -> None:
        self.log.append(text)

    @endpoint
    async def wait(self, text: str) -> str:
        self.log.append(f"{text} begins")
        await self.gate.wait()
        self.log.append(f"{text} ends")
        return text


class Failing(Actor):
    def __init__(self, where: str) -> None:
        self.where = where
        self.fail("constructor")

    async def on_start(self) -> None:
        self.fail("on_start")
        if self.where == "cancel":
            raise asyncio.CancelledError

    async def on_stop(self) -> None:
        self.fail("on_stop")

    @endpoint
    async def hello(self) -> str:
        return "hello"

    def fail(self, here: str) -> None:
        if self.where == here:
            raise ZeroDivisionError(here)


class Slow(Actor):
    def __init__(self, log: Log, gate: asyncio.Event) -> None:
        self.log = log
        self.gate = gate

    async def on_start(self) -> None:
        self.log.append("start begins")
        try:
            await self.gate.wait()
        finally:
            self.log.append("start ends")

    async def on_stop(self) -> None:
        self.log.append("stop")

    @endpoint
    async def note(self, text: str) -> None:
        self.log.append(text)


class Threaded(Actor):
    """Blocks in its thread; the test holds the events."""

    def __init__(self, entered: threading.Event, gate: threading.Event) -> None:
        self.entered = entered
        self.gate = gate
        self.threads: list[int] = []

    @endpoint
    def block(self) -> str:
        self.threads.append(threading.get_ident())
        self.entered.set()
        assert self.gate.wait(10)
        return "done"

    @endpoint
    async def on_the_loop(self) -> list[int]:
        self.threads.append(threading.get_ident())
        return self.threads


# -- starting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["constructor", "on_start"])
@pytest.mark.promise("start", "name")
async def test_a_failed_start_raises_at_the_caller_and_frees_the_name(open_ranks: Any, where: str) -> None:
    async with open_ranks(1) as ranks:
        with pytest.raises(ZeroDivisionError, match=where):
            await ranks.systems[0].spawn(Failing, where, name="f")
        ref = await ranks.systems[0].spawn(Failing, "nowhere", name="f")
        assert await ref.hello() == "hello"


async def test_an_on_start_that_cancels_itself_is_a_failed_start(open_ranks: Any) -> None:
    async with open_ranks(1) as ranks:
        with pytest.raises(AsyncparError, match="actor 'f': on_start cancelled itself"):
            await ranks.systems[0].spawn(Failing, "cancel", name="f")


@pytest.mark.promise("start")
async def test_messages_wait_until_the_actor_has_started(open_ranks: Any) -> None:
    log = Log()
    gate = asyncio.Event()
    async with open_ranks(1) as ranks:
        spawning = asyncio.create_task(ranks.systems[0].spawn(Slow, log, gate, name="s"))
        await log.shows("start begins")
        asking = asyncio.create_task(ranks.systems[0].ref("s").note("message"))
        gate.set()
        await asyncio.gather(spawning, asking)
    assert log == ["start begins", "start ends", "message", "stop"]


async def test_a_cancelled_spawn_ends_the_actor_and_refuses_its_messages(open_ranks: Any) -> None:
    log = Log()
    async with open_ranks(1) as ranks:
        spawning = asyncio.create_task(ranks.systems[0].spawn(Slow, log, asyncio.Event(), name="s"))
        await log.shows("start begins")
        asking = asyncio.create_task(ranks.systems[0].ref("s").note("message"))
        await asyncio.sleep(0)
        spawning.cancel()
        with pytest.raises(ActorDown, match="note of <actor 's' on rank 0>: the actor was killed"):
            await asking
        with pytest.raises(ActorDown, match="note of <actor 's' on rank 0>: the actor was killed"):
            await ranks.systems[0].ref("s").note("message")
    assert log == ["start begins", "start ends"]


async def test_closing_ends_a_spawn_that_waits(open_ranks: Any) -> None:
    log = Log()
    async with open_ranks(1) as ranks:
        spawning = asyncio.create_task(ranks.systems[0].spawn(Slow, log, asyncio.Event(), name="s"))
        await log.shows("start begins")
        await ranks.systems[0].close()
        with pytest.raises(PeerLost, match="this node is closed"):
            await spawning


async def test_a_spawn_cancelled_before_it_began_constructs_nothing(open_ranks: Any) -> None:
    log = Log()
    async with open_ranks(1) as ranks:
        spawning = asyncio.create_task(ranks.systems[0].spawn(Recorder, log, name="r"))
        await asyncio.sleep(0)
        spawning.cancel()
        await asyncio.wait({spawning})
        assert spawning.cancelled()
    assert log == []


async def test_stopping_an_actor_before_it_has_started_ends_its_spawn(open_ranks: Any) -> None:
    log = Log()
    async with open_ranks(1) as ranks:
        spawning = asyncio.create_task(ranks.systems[0].spawn(Recorder, log, name="r"))
        await asyncio.sleep(0)
        await ranks.systems[0].stop(ranks.systems[0].ref("r"))
        with pytest.raises(PeerCancelled, match="actor 'r': the actor was stopped before it had started"):
            await spawning
    assert log == []


# -- one message at a time ---------------------------------------------------------------------------------------------


@pytest.mark.promise("sequential")
async def test_messages_are_handled_one_at_a_time(open_ranks: Any) -> None:
    log = Log()
    gate = asyncio.Event()
    async with open_ranks(2) as ranks:
        await ranks.systems[1].spawn(Recorder, log, gate=gate, name="r")
        asks = [asyncio.create_task(system.ref("r", rank=1).wait("w")) for system in ranks.systems]
        await log.shows("w begins")
        gate.set()
        await asyncio.gather(*asks)
    assert log[1:-1] == ["w begins", "w ends"] * 2


async def test_a_long_mailbox_lets_others_run(open_ranks: Any) -> None:
    log = Log()
    async with open_ranks(1) as ranks:
        ref = await ranks.systems[0].spawn(Recorder, log)
        for _ in range(3 * BURST):
            ref.note.tell("x")
        await log.shows("x")
        assert log.count("x") == BURST
        await ref.note("last")


class Watcher(Actor):
    @endpoint
    async def look(self, array: np.ndarray) -> None:
        self.weak = weakref.ref(array)

    def is_alive(self) -> bool:
        return self.weak() is not None


async def test_an_idle_actor_keeps_no_message_alive(open_ranks: Any) -> None:
    watchers: list[Watcher] = []

    class Seen(Watcher):
        async def on_start(self) -> None:
            watchers.append(self)

    async with open_ranks(2) as ranks:
        await ranks.systems[1].spawn(Seen, name="w")
        await ranks.systems[0].ref("w", rank=1).look(np.zeros(1000))
        await asyncio.sleep(0)
        assert not watchers[0].is_alive()


class Killer(Actor):
    """Makes its own caller disappear."""

    def __init__(self, ranks: Any, log: Log) -> None:
        self.ranks = ranks
        self.log = log

    @endpoint
    async def kill(self, rank: int, is_patient: bool) -> None:
        self.ranks.kill(rank)
        if is_patient:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.log.append("cancelled")
                raise

    @endpoint
    async def hello(self) -> str:
        return "hello"


@pytest.mark.parametrize("is_patient", [False, True])
async def test_an_endpoint_that_ends_its_own_caller_is_cancelled_if_it_waits(open_ranks: Any, is_patient: bool) -> None:
    log = Log()
    async with open_ranks(3) as ranks:
        await ranks.systems[1].spawn(Killer, ranks, log, name="k")
        with pytest.raises(PeerLost):
            await ranks.systems[0].ref("k", rank=1).kill(0, is_patient)
        assert await ranks.systems[2].ref("k", rank=1).hello() == "hello"
    assert log == (["cancelled"] if is_patient else [])


@pytest.mark.promise("threads")
async def test_plain_endpoints_run_in_one_thread_that_is_not_the_loops(open_ranks: Any) -> None:
    entered, gate = threading.Event(), threading.Event()
    async with open_ranks(1) as ranks:
        ref = await ranks.systems[0].spawn(Threaded, entered, gate)
        asks = [asyncio.create_task(ref.block()) for _ in range(2)]
        await asyncio.to_thread(entered.wait, 10)
        gate.set()
        assert await asyncio.gather(*asks) == ["done", "done"]
        threads = await ref.on_the_loop()
    assert threads[0] == threads[1] != threads[2] == threading.get_ident()


async def test_a_cancelled_thread_is_let_finish_before_the_next_message(open_ranks: Any) -> None:
    entered, gate = threading.Event(), threading.Event()
    async with open_ranks(2) as ranks:
        await ranks.systems[1].spawn(Threaded, entered, gate, name="t")
        ref = ranks.systems[0].ref("t", rank=1)
        ask = asyncio.create_task(ref.block())
        await asyncio.to_thread(entered.wait, 10)
        ask.cancel()
        await asyncio.wait({ask})
        assert ask.cancelled()
        following = asyncio.create_task(ref.on_the_loop())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not following.done()
        gate.set()
        assert len(await following) == 2


async def test_closing_waits_for_the_thread_of_a_plain_endpoint(open_ranks: Any) -> None:
    entered, gate = threading.Event(), threading.Event()
    async with open_ranks(2) as ranks:
        await ranks.systems[1].spawn(Threaded, entered, gate, name="t")
        ask = asyncio.create_task(ranks.systems[0].ref("t", rank=1).block())
        await asyncio.to_thread(entered.wait, 10)
        closing = asyncio.create_task(ranks.systems[1].close())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not closing.done()
        gate.set()
        await closing
        with pytest.raises(PeerLost, match="the node was closed"):
            await ask


# -- stopping ----------------------------------------------------------------------------------------------------------


async def test_stop_drains_what_waits_and_refuses_what_comes_later(open_ranks: Any) -> None:
    log = Log()
    gate = asyncio.Event()
    async with open_ranks(2) as ranks:
        ref = await ranks.systems[1].spawn(Recorder, log, gate=gate, name="r")
        remote = ranks.systems[0].ref("r", rank=1)
        first = asyncio.create_task(remote.wait("first"))
        await log.shows("first begins")
        second = asyncio.create_task(remote.wait("second"))
        await asyncio.sleep(0)
        stopping = asyncio.create_task(ranks.systems[1].stop(ref))
        await asyncio.sleep(0)
        third = asyncio.create_task(remote.wait("third"))
        await asyncio.sleep(0)
        gate.set()
        assert await first == "first"
        assert await second == "second"
        await stopping
        with pytest.raises(ActorDown, match=r"rank 1: wait of .*: the actor was stopped") as caught:
            await third
        assert caught.value.rank == 1
        with pytest.raises(ActorDown, match=r"rank 1: wait of .*: the actor was stopped"):
            await remote.wait("fourth")
    assert log == ["it starts as r", "first begins", "first ends", "second begins", "second ends", "it stops"]


@pytest.mark.promise("name")
async def test_a_name_is_free_again_after_stop(open_ranks: Any) -> None:
    log = Log()
    async with open_ranks(2) as ranks:
        remote = ranks.systems[0].ref("r", rank=1)
        for turn in range(3):
            ref = await ranks.systems[1].spawn(Recorder, log, name="r")
            for _ in range(turn + 1):
                await remote.note(f"turn {turn}")
            await ranks.systems[1].stop(ref)
    assert [text for text in log if text.startswith("turn")] == ["turn 0", *["turn 1"] * 2, *["turn 2"] * 3]


async def test_stop_raises_what_on_stop_raised(open_ranks: Any) -> None:
    async with open_ranks(1) as ranks:
        ref = await ranks.systems[0].spawn(Failing, "on_stop")
        with pytest.raises(ZeroDivisionError, match="on_stop"):
            await ranks.systems[0].stop(ref)


async def test_only_actors_that_exist_can_be_stopped(open_ranks: Any) -> None:
    async with open_ranks(2) as ranks:
        with pytest.raises(UsageError, match="there is no actor 'r' on rank 1"):
            await ranks.systems[0].stop(ranks.systems[0].ref("r", rank=1))
        with pytest.raises(UsageError, match="there is no actor 'r' on rank 0"):
            await ranks.systems[0].stop(ranks.systems[0].ref("r"))


class Suicidal(Actor):
    def __init__(self, system: Any) -> None:
        self.system = system

    @endpoint
    async def stop(self) -> None:
        await self.system.stop(self.ref)


async def test_an_actor_that_waits_for_its_own_end_gets_an_error_instead_of_hanging(open_ranks: Any) -> None:
    async with open_ranks(1) as ranks:
        ref = await ranks.systems[0].spawn(Suicidal, ranks.systems[0])
        with pytest.raises(RemoteError, match="cannot wait for its own end"):
            await ref.stop()


# -- closing -----------------------------------------------------------------------------------------------------------


async def test_closing_stops_actors_newest_first_and_cancels_what_they_do(open_ranks: Any) -> None:
    log = Log()
    async with open_ranks(2) as ranks:
        for label in ("old", "middle", "new"):
            await ranks.systems[1].spawn(Recorder, log, label, name=label)
        asks = [asyncio.create_task(ranks.systems[0].ref("middle", rank=1).wait(text)) for text in ("a", "b")]
        await log.shows("a begins")
        log.clear()
        await ranks.systems[1].close()
        for ask in asks:
            with pytest.raises(PeerLost, match=r"rank 1: wait of .*: the node was closed"):
                await ask
        with pytest.raises(PeerLost, match="the node was closed"):
            await ranks.systems[0].ref("middle", rank=1).wait("late")
    assert log == ["new stops", "middle stops", "old stops"]


async def test_closing_ends_the_asks_of_this_rank_and_refuses_new_work(open_ranks: Any) -> None:
    log = Log()
    async with open_ranks(2) as ranks:
        await ranks.systems[1].spawn(Recorder, log, name="r")
        ref = ranks.systems[0].ref("r", rank=1)
        ask = asyncio.create_task(ref.wait("w"))
        await log.shows("w begins")
        await ranks.systems[0].close()
        await ranks.systems[0].close()
        with pytest.raises(PeerLost, match="wait of <actor 'r' on rank 1>: this node is closed"):
            await ask
        with pytest.raises(PeerLost, match="this node is closed"):
            await ref.note("late")
        with pytest.raises(PeerLost, match="this node is closed"):
            ref.note.tell("late")
        with pytest.raises(NodeClosed, match="spawn: this node is closed"):
            await ranks.systems[0].spawn(Recorder, log)


async def test_an_on_stop_that_raises_is_logged_and_the_others_stop(
    open_ranks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    log = Log()
    async with open_ranks(1) as ranks:
        await ranks.systems[0].spawn(Recorder, log)
        await ranks.systems[0].spawn(Failing, "on_stop", name="f")
    assert log[-1] == "it stops"
    assert [record.getMessage() for record in caplog.records] == ["rank 0: on_stop of actor 'f' raised"]
    assert "execution.py" not in caplog.text, "the traceback begins in the user's code"


class Flusher(Actor):
    def __init__(self, target: ActorRef[Recorder]) -> None:
        self.target = target

    async def on_stop(self) -> None:
        await self.target.note("flushed")


async def test_an_actor_can_reach_older_ones_while_it_stops(open_ranks: Any) -> None:
    log = Log()
    async with open_ranks(1) as ranks:
        await ranks.systems[0].spawn(Flusher, await ranks.systems[0].spawn(Recorder, log))
    assert log[-2:] == ["flushed", "it stops"]


async def test_a_cancelled_owner_still_stops_its_actors(open_ranks: Any) -> None:
    log = Log()

    async def own() -> None:
        async with open_ranks(1) as ranks:
            ref = await ranks.systems[0].spawn(Recorder, log)
            await ref.wait("w")

    owner = asyncio.create_task(own())
    await log.shows("w begins")
    owner.cancel()
    await asyncio.wait({owner})
    assert owner.cancelled()
    assert log[-1] == "it stops"


class Unmoved(Recorder):
    """Waits on, whatever is cancelled, once."""

    @endpoint
    async def wait(self, text: str) -> str:
        self.log.append(f"{text} begins")
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.log.append("not impressed")
            await self.gate.wait()
        return text


async def test_an_endpoint_that_survives_a_close_ends_when_the_close_is_cancelled(open_ranks: Any) -> None:
    log = Log()
    asks: list[asyncio.Task[Any]] = []

    async def own() -> None:
        async with open_ranks(1) as ranks:
            ref = await ranks.systems[0].spawn(Unmoved, log)
            asks.append(asyncio.create_task(ref.wait("w")))
            await log.shows("w begins")

    owner = asyncio.create_task(own())
    await log.shows("not impressed")
    owner.cancel()
    await asyncio.wait({owner})
    assert owner.cancelled()
    assert log[-1] == "it stops"
    with pytest.raises(PeerLost, match="this node is closed"):
        await asks[0]


class Stubborn(Recorder):
    async def on_stop(self) -> None:
        self.log.append("it hangs")
        try:
            await asyncio.Event().wait()
        finally:
            self.log.append("it was cancelled")


async def test_cancelling_a_close_that_hangs_cancels_the_actors(open_ranks: Any) -> None:
    log = Log()

    async def own() -> None:
        async with open_ranks(1) as ranks:
            await ranks.systems[0].spawn(Recorder, log)
            await ranks.systems[0].spawn(Stubborn, log)

    owner = asyncio.create_task(own())
    await log.shows("it hangs")
    owner.cancel()
    await asyncio.wait({owner})
    assert owner.cancelled()
    assert sorted(log[-2:]) == ["it stops", "it was cancelled"]
