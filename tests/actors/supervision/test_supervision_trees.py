"""Supervisors of supervisors."""

from __future__ import annotations

import asyncio
import math

from asyncpar.actors.runtime.ending import DownReason
from asyncpar.actors.supervision.child import Child
from asyncpar.actors.supervision.policy import Backoff, Intensity
from asyncpar.actors.supervision.supervisor import Supervisor
from tests.actors.supervision.conftest import Play, Stage


def branch(stage: Stage, name: str, labels: str, *, restarts: int = 1) -> Child:
    """Describe a supervisor of workers with these labels."""
    children = [stage.child(label) for label in labels]
    return Child(Supervisor, children, strategy="one_for_all", intensity=Intensity(restarts=restarts), name=name)


async def plant(stage: Stage, *, restarts: int = 1) -> Supervisor:
    """Start a tree two levels deep: left has a and b, right has c and d."""
    tree = [branch(stage, "left", "ab"), branch(stage, "right", "cd")]
    intensity = Intensity(restarts=restarts)
    root = await stage.node.spawn(Supervisor, tree, strategy="rest_for_one", intensity=intensity, name="root")
    assert stage.journal.take() == "+a +b +c +d"
    return root


def test_a_tree_is_started_in_order_and_stopped_in_reverse_order(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        await stage.node.stop_actor(await plant(stage))
        assert stage.journal.take() == "-d -c -b -a"

    play(scene)


def test_a_failure_is_mended_where_it_happens(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        await plant(stage)
        await stage.crash("b")
        assert stage.journal.take() == "-b -a +a +b"

    play(scene)


def test_a_branch_that_gives_up_is_restarted_with_all_its_children_by_its_owner(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        root = await plant(stage)
        await stage.crash("a")
        stage.journal.take()
        await stage.crash("a")
        assert stage.journal.take() == "-a -b -d -c +a +b +c +d"
        left, right = await root.children()
        assert (left.restarts, right.restarts) == (1, 1)
        assert left.last_failure.startswith("asyncpar.errors.RestartsExceeded: supervisor 'left' gives up")
        (worker, _) = await stage.node.ref("left", actor_class=Supervisor).children()
        assert worker.restarts == 0, "a branch that was restarted starts over"

    play(scene)


def test_a_tree_in_which_nothing_helps_fails_at_its_root(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        watch = stage.node.watch(await plant(stage))
        for _ in range(4):
            await stage.crash("c")
        down = await watch
        assert down.reason is DownReason.FAILED
        assert "supervisor 'root' gives up" in str(down.error)
        assert "supervisor 'right' gives up" in str(down.error)
        assert "ValueError: c is broken" in str(down.error)
        assert stage.journal.take().endswith("-c -d -b -a")

    play(scene)


def test_killing_the_root_kills_the_whole_tree(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        root = await plant(stage)
        watches = [stage.node.watch(stage.node.ref(label)) for label in "abcd"]
        await stage.node.kill_actor(root)
        assert [(await watch).reason for watch in watches] == [DownReason.KILLED] * 4
        assert stage.journal.take() == ""

    play(scene)


def test_a_branch_has_all_the_time_that_its_children_need_to_stop(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        leaf = stage.child("a", shutdown=math.inf)
        root = await stage.node.spawn(Supervisor, [Child(Supervisor, [leaf], name="branch")])
        stage.journal.slow_stop["a"] = 100.0
        await stage.node.stop_actor(root)
        assert stage.journal.take() == "+a -a"

    play(scene)


def test_a_tree_can_be_stopped_while_a_branch_waits(play: Play[None]) -> None:
    async def scene(stage: Stage) -> None:
        waiting = Child(Supervisor, [stage.child("a")], backoff=Backoff(initial=60.0), name="branch")
        root = await stage.node.spawn(Supervisor, [waiting, stage.child("b")])
        await stage.crash("a")
        await stage.node.stop_actor(root)
        await asyncio.sleep(120.0)
        assert stage.journal.take() == "+a +b -a -b"

    play(scene)
