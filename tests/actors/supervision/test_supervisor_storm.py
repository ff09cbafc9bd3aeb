"""Everything that can happen to supervised actors, in seeded disorder."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from asyncpar.actors.supervision.child import ChildState
from asyncpar.actors.supervision.policy import Backoff, Intensity
from asyncpar.actors.supervision.supervisor import Supervisor
from asyncpar.errors import AsyncparError
from tests.actors.supervision.conftest import Play, Stage
from tests.soak import chosen

LABELS = "abcd"


async def trouble(stage: Stage, supervisor: Supervisor, chance: random.Random) -> None:
    """Do one bad thing to one child, or ask something of its supervisor, and do not wait long for an answer."""
    label = chance.choice(LABELS)
    stage.journal.faults[label] = chance.choice([0, 0, 0, 1])
    stage.journal.slow_start[label] = chance.choice([0.0, 0.3])
    stage.journal.slow_stop[label] = chance.choice([0.0, 0.3, 3.0])
    worker = stage.worker(label)
    deeds: list[Callable[[], Awaitable[object]]] = [
        worker.crash,
        worker.leave,
        worker.hang,
        lambda: supervisor.restart_child(label),
    ]
    try:
        async with asyncio.timeout(chance.choice([0.01, 0.5])):
            match chance.randrange(6):
                case 0:
                    await stage.node.kill_actor(stage.node.ref(label))
                case 1:
                    worker.crash.tell()
                case turn:
                    await deeds[turn - 2]()
    except (AsyncparError, TimeoutError):
        return  # the child may be down, or its supervisor busy


@pytest.mark.parametrize("strategy", ["one_for_one", "one_for_all", "rest_for_one"])
@pytest.mark.parametrize("seed", range(chosen(2, soak=20)))
def test_all_children_run_again_after_a_storm(play: Play[None], strategy: str, seed: int) -> None:
    async def scene(stage: Stage) -> None:
        chance = random.Random(seed)
        supervisor = await stage.node.spawn(
            Supervisor,
            [stage.child(label, shutdown=1.0) for label in LABELS],
            strategy=strategy,
            intensity=Intensity(restarts=1_000),
            backoff=Backoff(initial=0.1, maximum=0.4, jitter=0.5),
        )
        for _ in range(60):
            await trouble(stage, supervisor, chance)
            await asyncio.sleep(chance.choice([0.0, 0.0, 0.2, 2.0]))
        stage.journal.faults.clear()
        await asyncio.sleep(60.0)
        assert {status.state for status in await supervisor.children()} == {ChildState.RUNNING}
        assert stage.journal.lives.total() > 20
        assert [await stage.worker(label).life() for label in LABELS] == list(stage.journal.lives.values())
        stage.journal.slow_stop.clear()
        stage.journal.take()
        await stage.node.stop_actor(supervisor)
        assert stage.journal.take() == "-d -c -b -a"

    play(scene)
