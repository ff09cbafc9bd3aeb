"""Members that are tasks are ranks of the production agent: it starts them, counts their crashes, and ends the job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.elasticity.worlds import WorldSource
from asyncpar.errors import UsageError
from asyncpar.hosts.lineage import Decision
from asyncpar.launch.agents.host_agent import HostAgent
from asyncpar.testing import run_virtual
from asyncpar.testing.elastic_worlds import ElasticWorlds

UNTIL = 6
InStep = Callable[[int], None]


def member(in_step: InStep = lambda _: None) -> Callable[[WorldSource], Coroutine[Any, Any, float]]:
    async def main(source: WorldSource) -> float:
        weights = {"w": np.zeros(2)}
        async with ap.elastic(portions=4, source=source) as job:
            state = job.state(weights)
            async for step in job.steps(state, until=UNTIL):
                async with step:
                    for portion in step.portions:
                        step.add(portion, {"w": np.ones(2)})
                        await asyncio.sleep(0.05)
                    in_step(step.number)
                    weights["w"] += (await step.reduce())["w"]
        return float(weights["w"][0])

    return main


def test_the_agent_gets_all_that_happens_to_members() -> None:
    async def main() -> None:
        async with ElasticWorlds(4) as worlds:

            def fail(number: int) -> None:
                if number == 1:
                    raise ZeroDivisionError("a bug")

            def kill(number: int) -> None:
                if number == 2:
                    asyncio.get_running_loop().call_soon(worlds.kill, "m2")

            def drain(number: int) -> None:
                if number == 3:
                    worlds.drain("m3")

            for number, in_step in enumerate((lambda _: None, fail, kill, drain)):
                worlds.start(f"m{number}", member(in_step))
            assert await worlds.tasks["m0"] == 4.0 * UNTIL
            await asyncio.wait(worlds.tasks.values())
            await asyncio.sleep(0.1)
            assert [world.members for world in worlds.worlds] == [
                ("m0", "m1", "m2", "m3"),
                ("m0", "m2", "m3"),
                ("m0", "m3"),
                ("m0",),
            ]
            assert [world.change.left for world in worlds.worlds] == [(), ("m1",), ("m2",), ("m3",)]
            assert [world.change.is_by_loss for world in worlds.worlds] == [False, True, True, False]
            assert {world.decision for world in worlds.worlds} == {Decision.ABORT}
            printed = "\n".join(worlds.lines)
            for line in (
                "rank host/1 exited with code 1; it starts again",
                "rank host/2 was killed by SIGKILL; it starts again",
                "rank host/3 starts again: it was drained",
                "the job is complete",
            ):
                assert line in printed

    run_virtual(main())


@pytest.mark.parametrize("notice", [0.0, 2.0])
def test_the_agent_notices_a_killed_member_when_it_is_asked_to(notice: float) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with ElasticWorlds(2, notice=notice) as worlds:
            tasks = [worlds.start(f"m{n}", member()) for n in range(2)]
            await worlds.formed(1)
            killed_at = loop.time()
            worlds.kill("m1")
            assert worlds.present == ["m0"]
            await worlds.formed(2)
            assert notice <= loop.time() - killed_at < notice + 0.1
            assert await tasks[0] == 4.0 * UNTIL
            assert tasks[1].cancelled()

    run_virtual(main())


def test_a_member_that_the_agent_ends_is_killed() -> None:
    """Both begin with another state: the leader stops the job."""

    async def main() -> None:
        async def other(source: WorldSource) -> None:
            async with ap.elastic(portions=4, source=source) as job:
                await anext(job.steps(job.state({"w": np.ones(2)}), until=UNTIL))

        async with ElasticWorlds(2) as worlds:
            tasks = [worlds.start("m0", member()), worlds.start("m1", other)]
            await asyncio.wait(tasks)
            assert [task.cancelled() for task in tasks] == [True, True]
            await asyncio.sleep(0.1)
            assert "the job ends with exit code" in worlds.lines[-1]

    run_virtual(main())


def test_a_name_is_used_once() -> None:
    async def main() -> None:
        async with ElasticWorlds(1) as worlds:
            await worlds.start("m0", member())
            with pytest.raises(UsageError, match="a name of its own"):
                worlds.start("m0", member())

    run_virtual(main())


def test_a_failure_of_the_agent_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_: HostAgent) -> None:
        await asyncio.sleep(1.0)
        raise ZeroDivisionError("a bug of the agent")

    async def main() -> None:
        async with ElasticWorlds(1) as worlds:
            await worlds.start("m0", member())
            await asyncio.sleep(2.0)

    run = HostAgent.run

    async def run_and_fail(agent: HostAgent) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run(agent))
            await broken(agent)

    monkeypatch.setattr(HostAgent, "run", run_and_fail)
    with pytest.raises(ExceptionGroup, match="TaskGroup"):
        run_virtual(main())
