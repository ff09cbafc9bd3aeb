"""Supervisors over real actors: who is started, restarted and given up, and what others see of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncpar.actors.runtime.actor import Actor
from asyncpar.actors.runtime.ending import Down, DownReason
from asyncpar.actors.supervision.child import Child, ChildState
from asyncpar.actors.supervision.policy import Backoff, Intensity
from asyncpar.actors.supervision.supervisor import Supervisor
from asyncpar.errors import ActorDown, RemoteError, UsageError
from asyncpar.testing import local_world, run_virtual
from tests.actors.supervision.conftest import Journal, Play, Stage, Worker


async def supervise(stage: Stage, labels: str = "abc", **options: Any) -> Supervisor:
    """Start permanent children with these labels."""
    supervisor = await stage.node.spawn(Supervisor, [stage.child(label) for label in labels], name="s", **options)
    assert stage.journal.take() == " ".join(f"+{label}" for label in labels)
    return supervisor


# -- starting ----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("supervise-order")
def test_children_are_started_in_order_and_stopped_in_reverse_order(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        supervisor = await supervise(stage)
        await stage.node.stop_actor(supervisor)
        assert stage.journal.take() == "-c -b -a"

    play(scene)


@pytest.mark.promise("supervise-start")
def test_a_child_that_does_not_start_has_spawn_raise_its_error_and_the_others_stopped(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        stage.journal.faults["c"] = 1
        with pytest.raises(OSError, match="c cannot start"):
            await stage.node.spawn(Supervisor, [stage.child(label) for label in "abcd"])
        assert stage.journal.take() == "+a +b !c -b -a"

    play(scene)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"strategy": "all"}, r"strategy: expected one of 'one_for_one', 'one_for_all', 'rest_for_one', got 'all'"),
        ({"intensity": 3}, r"intensity: expected Intensity\(...\), got 3"),
        ({"backoff": 0.5}, r"backoff: expected Backoff\(...\), got 0.5"),
    ],
)
def test_wrong_options_are_refused_by_name(play: Play[None], options: dict[str, Any], text: str) -> None:
    async def scene(stage: Stage) -> None:
        with pytest.raises(UsageError, match=text):
            await stage.node.spawn(Supervisor, [stage.child("a")], **options)
        assert stage.journal.take() == ""

    play(scene)


def test_a_name_that_is_taken_keeps_the_supervisor_from_starting(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        await stage.node.spawn(Actor, name="b")
        with pytest.raises(UsageError, match="name: 'b' is taken"):
            await stage.node.spawn(Supervisor, [stage.child("a"), stage.child("b")])
        assert stage.journal.take() == "+a -a"

    play(scene)


# -- restarting --------------------------------------------------------------------------------------------------------


@pytest.mark.promise("one-for-one", "one-for-all", "rest-for-one")
@pytest.mark.parametrize(
    ("strategy", "what"),
    [("one_for_one", "+b"), ("one_for_all", "-c -a +a +b +c"), ("rest_for_one", "-c +b +c")],
)
def test_the_strategy_says_who_is_restarted(play: Play[None], strategy: str, what: str) -> None:
    async def scene(stage: Stage) -> None:
        await supervise(stage, strategy=strategy)
        await stage.crash("b")
        assert stage.journal.take() == f"-b {what}"

    play(scene)


@pytest.mark.promise("supervise-names")
def test_references_to_a_child_go_on_working(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        await supervise(stage, "a")
        worker = stage.worker("a")
        assert await worker.life() == 1
        await stage.crash("a")
        assert await worker.life() == 2

    play(scene)


@pytest.mark.promise("supervise-names")
def test_what_is_asked_when_a_child_fails_is_answered_with_its_end(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        await supervise(stage, "a", backoff=Backoff(initial=1.0))
        worker = stage.worker("a")
        worker.crash.tell()
        with pytest.raises(ActorDown, match="the actor failed: ValueError: a is broken"):
            await worker.life()
        with pytest.raises(ActorDown, match="the actor failed: ValueError: a is broken"):
            await worker.life()  # it waits for its restart
        worker.crash.tell()
        await stage.settle()
        assert [letter.actor for letter in stage.node.dead_letters.recent] == ["a"]
        await asyncio.sleep(1.0)
        assert await worker.life() == 2

    play(scene)


def test_what_a_child_raises_when_asked_is_no_failure(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        await supervise(stage, "a")
        with pytest.raises(RemoteError, match="a is broken"):
            await stage.worker("a").crash()
        assert await stage.worker("a").life() == 1

    play(scene)


def test_a_child_that_is_killed_while_it_works_is_restarted(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        supervisor = await supervise(stage, "a")
        hanging = asyncio.ensure_future(stage.worker("a").hang())
        await stage.settle()
        await stage.node.kill_actor(stage.node.ref("a"))
        with pytest.raises(ActorDown, match="the actor was killed"):
            await hanging
        await stage.settle()
        assert stage.journal.take() == "+a"
        (status,) = await supervisor.children()
        assert status.last_failure == "ActorDown: actor 'a' was killed"

    play(scene)


@pytest.mark.promise("restart-kinds")
@pytest.mark.parametrize(("restart", "lives"), [("permanent", 2), ("transient", 1), ("temporary", 1)])
def test_a_child_that_leaves_is_restarted_if_it_is_permanent(play: Play[None], restart: str, lives: int) -> None:
    async def scene(stage: Stage) -> None:
        await stage.node.spawn(Supervisor, [stage.child("a", restart=restart)])
        await stage.worker("a").leave()
        await stage.settle()
        assert stage.journal.lives["a"] == lives

    play(scene)


@pytest.mark.promise("restart-kinds")
@pytest.mark.parametrize(("restart", "lives"), [("permanent", 2), ("transient", 2), ("temporary", 1)])
def test_a_child_that_fails_is_restarted_unless_it_is_temporary(play: Play[None], restart: str, lives: int) -> None:
    async def scene(stage: Stage) -> None:
        await stage.node.spawn(Supervisor, [stage.child("a", restart=restart)])
        await stage.crash("a")
        assert stage.journal.lives["a"] == lives

    play(scene)


@pytest.mark.parametrize(("restart", "lives"), [("permanent", 2), ("transient", 1)])
def test_a_child_that_somebody_else_stops_has_ended_in_order(play: Play[None], restart: str, lives: int) -> None:
    async def scene(stage: Stage) -> None:
        await stage.node.spawn(Supervisor, [stage.child("a", restart=restart)])
        await stage.node.stop_actor(stage.node.ref("a"))
        await stage.settle()
        assert stage.journal.lives["a"] == lives

    play(scene)


def test_children_that_fail_together_are_all_restarted(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        await supervise(stage)
        await stage.crash("c", "a")
        assert stage.journal.lives == {"a": 2, "b": 1, "c": 2}

    play(scene)


def test_a_sibling_that_failed_meanwhile_is_restarted_once(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        supervisor = await supervise(stage, strategy="one_for_all", intensity=Intensity(restarts=1))
        await stage.crash("a", "b", "c")
        assert stage.journal.lives == {"a": 2, "b": 2, "c": 2}
        assert [status.state for status in await supervisor.children()] == [ChildState.RUNNING] * 3

    play(scene)


def test_a_child_that_fails_while_another_one_is_slow_to_start_is_restarted_after_it(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        supervisor = await supervise(stage, "ab")
        stage.journal.slow_start["a"] = 10.0
        await stage.crash("a")
        await stage.crash("b")
        states = [status.state for status in await supervisor.children()]
        assert states == [ChildState.STARTING, ChildState.RUNNING]  # b's end was not announced yet
        await asyncio.sleep(10.0)
        assert stage.journal.take() == "-a -b +a +b"

    play(scene)


def test_a_start_that_fails_while_restarting_is_a_failed_restart(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        supervisor = await supervise(stage, "ab", intensity=Intensity(restarts=3))
        stage.journal.faults["a"] = 2
        await stage.crash("a")
        assert stage.journal.take() == "-a !a !a +a"
        status, _ = await supervisor.children()
        assert (status.restarts, status.last_failure) == (3, "OSError: a cannot start")
        await stage.crash("a")  # and now it is one too many
        assert stage.journal.take() == "-a -b"

    play(scene)


# -- giving up ---------------------------------------------------------------------------------------------------------


@pytest.mark.promise("intensity")
def test_too_many_restarts_are_a_failure_of_the_supervisor(play: Play[Down]) -> None:
    async def scene(stage: Stage) -> Down:
        supervisor = await supervise(stage, "abc", intensity=Intensity(restarts=2, period=5.0))
        watch = stage.node.watch(supervisor)
        for _ in range(3):
            await stage.crash("b")
        assert stage.journal.take() == "-b +b -b +b -b -c -a"
        return await watch

    down = play(scene)
    assert down.reason is DownReason.FAILED
    assert isinstance(down.error, RemoteError)
    assert down.error.type_name == "asyncpar.errors.RestartsExceeded"
    assert down.error.message == (
        "supervisor 's' gives up: its intensity allows 2 restarts in 5 s, and child 'b' failed with "
        "ValueError: b is broken after that"
    )
    assert "ValueError: b is broken" in down.error.remote_traceback


def test_restarts_that_are_far_apart_never_are_too_many(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        await supervise(stage, "a", intensity=Intensity(restarts=1, period=5.0))
        for _ in range(10):
            await stage.crash("a")
            await asyncio.sleep(6.0)
        assert stage.journal.lives["a"] == 11

    play(scene)


# -- back-off ----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("backoff")
def test_backoff_delays_restarts_more_and_more(play: Play[list[float]]) -> None:
    async def scene(stage: Stage) -> list[float]:
        backoff = Backoff(initial=1.0, factor=2.0, maximum=4.0, reset_after=60.0)
        await supervise(stage, "a", backoff=backoff, intensity=Intensity(restarts=9))
        delays = []
        for _ in range(4):
            failed_at = asyncio.get_running_loop().time()
            stage.worker("a").crash.tell()
            await asyncio.sleep(6.0)
            delays.append(stage.journal.started_at - failed_at)
        return delays

    assert play(scene) == pytest.approx([1.0, 2.0, 4.0, 4.0])


def test_a_supervisor_that_waits_still_answers_and_looks_after_others(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        supervisor = await supervise(stage, "ab", backoff=Backoff(initial=8.0))
        await stage.crash("a")
        await asyncio.sleep(4.0)
        await stage.crash("b")
        assert [status.state for status in await supervisor.children()] == [ChildState.WAITING] * 2
        await asyncio.sleep(4.0)
        states = [status.state for status in await supervisor.children()]
        assert states == [ChildState.RUNNING, ChildState.WAITING]
        await asyncio.sleep(4.0)
        assert stage.journal.take() == "-a -b +a +b"

    play(scene)


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_children_reports_where_they_stand(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        supervisor = await stage.node.spawn(
            Supervisor, [stage.child("a"), stage.child("b", restart="transient"), stage.child("c", restart="temporary")]
        )
        await stage.crash("a", "b", "c")
        await stage.worker("b").leave()
        await stage.settle()
        a, b = await supervisor.children()
        assert (a.name, a.actor_class, a.state, a.restarts) == ("a", "Worker", ChildState.RUNNING, 1)
        assert a.last_failure == "ValueError: a is broken"
        assert (b.name, b.state, b.restarts) == ("b", ChildState.STOPPED, 1)

    play(scene)


def test_a_terminated_child_stays_down_until_it_is_asked_for(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        supervisor = await supervise(stage, intensity=Intensity(restarts=0))
        await supervisor.terminate_child("b")
        assert stage.journal.take() == "-b"
        await asyncio.sleep(60.0)
        _, status, _ = await supervisor.children()
        assert status.state is ChildState.STOPPED
        await supervisor.restart_child("b")
        await supervisor.restart_child("b")
        assert stage.journal.take() == "+b -b +b"

    play(scene)


def test_a_child_is_restarted_by_hand_without_waiting(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        supervisor = await supervise(stage, "a", backoff=Backoff(initial=60.0))
        await stage.crash("a")
        await supervisor.restart_child("a")
        assert stage.journal.take() == "-a +a"
        await asyncio.sleep(120.0)
        assert stage.journal.take() == ""

    play(scene)


def test_a_start_by_hand_that_fails_is_reported_to_the_caller(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        supervisor = await supervise(stage, "a")
        await supervisor.terminate_child("a")
        stage.journal.faults["a"] = 1
        with pytest.raises(RemoteError, match="OSError: a cannot start"):
            await supervisor.restart_child("a")
        assert stage.journal.take() == "-a !a"
        await supervisor.restart_child("a")
        assert stage.journal.take() == "+a"

    play(scene)


def test_a_caller_that_asks_and_goes_before_it_begins_changes_nothing(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        supervisor = await supervise(stage, "ab")
        stage.journal.slow_start["a"] = 10.0
        await stage.crash("a")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await supervisor.terminate_child("b")  # has to wait for a
        await asyncio.sleep(10.0)
        assert stage.journal.take() == "-a +a"

    play(scene)


def test_a_supervisor_can_be_asked_from_another_rank() -> None:
    async def main() -> None:
        journal = Journal()
        async with local_world(2) as (here, there):
            await here.spawn(Supervisor, [Child(Worker, journal, "a", name="a")], name="s")
            supervisor = there.ref("s", rank=0, actor_class=Supervisor)
            await supervisor.restart_child("a")
            assert [(status.name, status.restarts) for status in await supervisor.children()] == [("a", 1)]
            assert await there.ref("a", rank=0, actor_class=Worker).life() == 2

    run_virtual(main())


def test_an_unknown_child_is_refused_with_those_there_are(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        supervisor = await supervise(stage, "ab")
        with pytest.raises(RemoteError, match=r"UsageError: child: expected the name of a child \('a', 'b'\), got 'c'"):
            await supervisor.terminate_child("c")

    play(scene)


def test_a_caller_that_asks_and_goes_leaves_no_child_half_started(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        supervisor = await supervise(stage, "a")
        stage.journal.slow_start["a"] = 10.0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await supervisor.restart_child("a")
        await asyncio.sleep(10.0)
        assert stage.journal.take() == "-a +a"

    play(scene)
