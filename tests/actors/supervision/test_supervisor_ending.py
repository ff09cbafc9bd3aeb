"""Supervisors end at any moment: stopped, killed, or closed with their node."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.actors.runtime.ending import DownReason
from asyncpar.actors.supervision.child import Child
from asyncpar.actors.supervision.policy import Backoff
from asyncpar.actors.supervision.supervisor import Supervisor
from asyncpar.errors import ActorDown
from asyncpar.testing import local_world, run_virtual
from tests.actors.supervision.conftest import Journal, Play, Stage, Worker


async def supervise(stage: Stage, labels: str = "abc", **options: Any) -> Supervisor:
    """Start permanent children with these labels, which may take 5 s to stop."""
    supervisor = await stage.node.spawn(Supervisor, [stage.child(label) for label in labels], name="s", **options)
    stage.journal.take()
    return supervisor


async def alive(stage: Stage, labels: str) -> str:
    """Return the labels of those that run."""
    watches = {label: stage.node.watch(stage.node.ref(label)) for label in labels}
    await stage.settle()
    running = [label for label, watch in watches.items() if watch.down is None]
    for watch in watches.values():
        watch.cancel()
    return "".join(running)


def now() -> float:
    return asyncio.get_running_loop().time()


# -- stopped -----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("supervise-order")
def test_children_are_stopped_in_reverse_order_also_after_restarts(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        supervisor = await supervise(stage)
        await stage.crash("a")
        stage.journal.take()
        await stage.node.stop_actor(supervisor)
        assert stage.journal.take() == "-c -b -a"

    play(scene)


def test_a_stop_during_a_wait_is_not_held_up_and_starts_nothing(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        supervisor = await supervise(stage, "ab", backoff=Backoff(initial=60.0))
        await stage.crash("a")
        stopped_at = now()
        await stage.node.stop_actor(supervisor)
        assert now() == stopped_at
        await asyncio.sleep(120.0)
        assert stage.journal.take() == "-a -b"
        assert stage.node.dead_letters.count == 0

    play(scene)


def test_a_stop_lets_a_child_finish_what_waits_for_it(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        supervisor = await supervise(stage, "a")
        worker = stage.worker("a")
        asked = [asyncio.ensure_future(worker.life()) for _ in range(3)]
        await stage.settle()
        await stage.node.stop_actor(supervisor)
        assert await asyncio.gather(*asked) == [1, 1, 1]

    play(scene)


@pytest.mark.promise("supervise-shutdown")
@pytest.mark.parametrize(("shutdown", "takes", "what"), [(2.0, 2.0, ""), (math.inf, 100.0, "-a"), (0.0, 0.0, "")])
def test_a_stop_that_takes_too_long_becomes_a_kill(play: Play[None], shutdown: float, takes: float, what: str) -> None:
    async def scene(stage: Stage) -> None:
        supervisor = await stage.node.spawn(Supervisor, [stage.child("a", shutdown=shutdown)])
        stage.journal.take()
        stage.journal.slow_stop["a"] = 100.0
        stopped_at = now()
        await stage.node.stop_actor(supervisor)
        assert now() - stopped_at == pytest.approx(takes)
        assert stage.journal.take() == what

    play(scene)


def test_a_sibling_that_does_not_stop_in_time_is_killed_and_the_restart_goes_on(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        children = [stage.child("a"), stage.child("b", shutdown=2.0)]
        await stage.node.spawn(Supervisor, children, strategy="one_for_all")
        stage.worker("b").hang.tell()
        await stage.crash("a")
        await asyncio.sleep(2.0)
        await stage.settle()
        assert stage.journal.take() == "+a +b -a +a +b"

    play(scene)


def test_a_child_whose_on_stop_raises_is_logged_and_gone(play: Play[None], caplog: pytest.LogCaptureFixture) -> None:
    class Sore(Actor):
        async def on_stop(self) -> None:
            raise KeyError("sore")

    async def scene(stage: Stage) -> None:
        supervisor = await stage.node.spawn(Supervisor, [stage.child("a"), Child(Sore, name="sore")], name="s")
        await stage.node.stop_actor(supervisor)
        assert stage.journal.take() == "+a -a"

    play(scene)
    (record,) = caplog.records
    assert record.getMessage() == "<Supervisor 's' on rank 0>: on_stop of child 'sore' raised"


def test_a_child_that_fails_while_its_supervisor_stops_is_not_restarted(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        supervisor = await supervise(stage, "ab")
        stage.journal.slow_stop["b"] = 1.0
        stopping = asyncio.ensure_future(stage.node.stop_actor(supervisor))
        await stage.settle()
        await stage.crash("a")
        await stopping
        assert stage.journal.take() == "-a -b"
        assert stage.journal.lives == {"a": 1, "b": 1}

    play(scene)


# -- killed ------------------------------------------------------------------------------------------------------------


def test_killing_a_supervisor_kills_its_children(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        supervisor = await supervise(stage)
        watch = stage.node.watch(stage.node.ref("b"))
        await stage.node.kill_actor(supervisor)
        assert (await watch).reason is DownReason.KILLED
        assert await alive(stage, "abc") == ""
        assert stage.journal.take() == ""

    play(scene)


def test_killing_a_supervisor_that_waits_leaves_nothing_behind(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        supervisor = await supervise(stage, "ab", backoff=Backoff(initial=1.0))
        await stage.crash("a")
        await stage.node.kill_actor(supervisor)
        await asyncio.sleep(2.0)
        assert stage.journal.take() == "-a"
        assert stage.node.dead_letters.count == 0

    play(scene)


def test_killing_a_supervisor_that_starts_a_child_ends_that_child(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        supervisor = await supervise(stage, "ab")
        stage.journal.slow_start["a"] = 10.0
        await stage.crash("a")
        await stage.node.kill_actor(supervisor)
        assert await alive(stage, "ab") == ""
        await asyncio.sleep(20.0)
        assert stage.journal.take() == "-a"

    play(scene)


def test_killing_a_supervisor_that_stops_cuts_it_short(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        supervisor = await supervise(stage, "ab")
        stage.journal.slow_stop["b"] = 4.0
        stopping = asyncio.ensure_future(stage.node.stop_actor(supervisor))
        await asyncio.sleep(1.0)
        killed_at = now()
        await stage.node.kill_actor(supervisor)
        await stopping
        assert now() == killed_at
        assert await alive(stage, "ab") == ""
        assert stage.journal.take() == ""

    play(scene)


def test_a_spawn_that_is_given_up_leaves_no_child_behind(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        stage.journal.slow_start["b"] = 10.0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await stage.node.spawn(Supervisor, [stage.child(label) for label in "ab"])
        await stage.settle()
        assert await alive(stage, "ab") == ""
        await asyncio.sleep(20.0)
        assert stage.journal.take() == "+a"

    play(scene)


# -- closed ------------------------------------------------------------------------------------------------------------


def close_node(journal: Journal, *, seconds: float, **options: Any) -> str:
    """Crash child a of three, leave the node after ``seconds``, and return what happened since the crash."""

    async def main() -> str:
        async with local_world(1) as (node,):
            children = [Child(Worker, journal, label, name=label) for label in "abc"]
            await node.spawn(Supervisor, children, **options)
            journal.take()
            node.ref("a").crash.tell()
            await asyncio.sleep(seconds)
        return journal.take()

    return run_virtual(main())


def test_a_node_that_closes_ends_children_in_reverse_order_also_after_restarts() -> None:
    assert close_node(Journal(), seconds=1.0) == "-a +a -c -b -a"


def test_a_node_that_closes_during_a_wait_starts_nothing() -> None:
    assert close_node(Journal(), seconds=1.0, backoff=Backoff(initial=60.0)) == "-a -c -b"


def test_a_node_that_closes_while_a_child_starts_ends_the_others_in_reverse_order() -> None:
    journal = Journal()
    journal.slow_start["b"] = 0.5
    assert close_node(journal, seconds=0.25, strategy="rest_for_one") == "-a -c -b +a -a"


def test_a_node_that_closes_while_a_child_stops_does_not_stop_it_twice() -> None:
    journal = Journal()
    journal.slow_stop["b"] = 1.0
    assert close_node(journal, seconds=0.5, strategy="one_for_all") == "-a -c -b"


# -- failed ------------------------------------------------------------------------------------------------------------


def test_a_supervisor_that_fails_itself_ends_its_children_in_reverse_order(play: Play[None]) -> None:
    class Fragile(Supervisor):
        @endpoint
        async def crash(self) -> None:
            raise ValueError("fragile")

    async def scene(stage: Stage) -> None:
        supervisor = await stage.node.spawn(Fragile, [stage.child(label) for label in "abc"])
        await stage.crash("a")
        stage.journal.take()
        watch = stage.node.watch(supervisor)
        supervisor.crash.tell()
        assert (await watch).reason is DownReason.FAILED
        assert stage.journal.take() == "-c -b -a"

    play(scene)


def test_the_failure_of_an_actor_that_a_subclass_spawned_is_its_own(play: Play[None]) -> None:
    class Busy(Supervisor):
        @endpoint
        async def hire(self, name: str) -> None:
            await self.spawn(Failing, name=name)

    class Failing(Actor):
        @endpoint
        async def fail(self) -> None:
            raise ValueError("not supervised")

    async def scene(stage: Stage) -> None:
        supervisor = await stage.node.spawn(Busy, [stage.child("a")])
        await supervisor.hire("extra")
        watch = stage.node.watch(supervisor)
        stage.node.ref("extra").fail.tell()
        assert "not supervised" in str((await watch).error)

    play(scene)


def test_a_caller_that_asks_a_supervisor_that_gives_up_gets_an_error(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        supervisor = await supervise(stage, "ab")
        stage.journal.faults["a"] = 9
        with pytest.raises(ActorDown, match=r"the actor failed: .*RestartsExceeded: supervisor 's' gives up"):
            await supervisor.restart_child("a")
        assert stage.journal.take() == "-a !a !a !a !a -b"

    play(scene)
