"""Pipelines in worlds that change: a lost stage comes from its replica, or a neighbour's memory, bit for bit."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.elasticity.pipeline_places import PipelinePlaces, by_stage
from asyncpar.elasticity.placement import plan_moves
from asyncpar.elasticity.step import ElasticStep
from asyncpar.elasticity.step_machine import Vote
from asyncpar.elasticity.worlds import WorldSource
from asyncpar.errors import DivergedState, StateLost, UsageError
from asyncpar.nn.optimizers import SGD, Optimizer
from asyncpar.pipeline.errors import ActionFailed
from asyncpar.testing import run_virtual
from asyncpar.testing.elastic_worlds import ElasticWorlds
from tests.elasticity.pipeline_training import make_stages, squares, train_pipeline
from tests.elasticity.training import OnStep, Result, Trace, most_left_at_once
from tests.products import in_turn
from tests.soak import chosen

UNTIL = 8
Main = Callable[[WorldSource], Coroutine[Any, Any, Result]]


@pytest.fixture(scope="module")
def alone() -> dict[int, Result]:
    """The runs without faults, in a world of one, by the number of stages."""
    return {stages: run_virtual(train_pipeline(None, until=UNTIL, stages=stages)) for stages in (2, 3)}


def member(name: str, trace: Trace, on_step: OnStep | None = None, **how: Any) -> Main:
    async def main(source: WorldSource) -> Result:
        return await train_pipeline(source, name, until=UNTIL, trace=trace, on_step=on_step, **how)

    return main


def check_run(trace: Trace, results: Sequence[Result], wanted: Result) -> None:
    for result in results:
        assert result.losses == wanted.losses
        assert result.digest == wanted.digest
        if result.parameters:  # a newcomer may come too late for a step of its own
            assert result.parameters == wanted.parameters
    assert {step: len(generations) for step, generations in trace.committed.items()} == dict.fromkeys(range(UNTIL), 1)


@pytest.mark.parametrize("size", range(1, 20))
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_every_world_has_whole_pipelines_and_two_holders_of_each_stage(stages: int, size: int) -> None:
    places = PipelinePlaces(stages, 8, size)
    ranks = range(size)
    placed = [rank for rank in ranks if places.replica_of(rank) is not None]
    assert len(placed) == places.width * places.replicas
    for first in placed[:: places.width]:
        pipeline = places.pipeline_of(first)
        assert list(itertools.chain(*(places.stages_of(rank) for rank in pipeline))) == list(range(stages))
    leads = [rank for rank in placed if rank % places.width == 0]
    assert list(itertools.chain(*(places.portions_of(rank) for rank in leads))) == list(range(8))
    placement = by_stage(stages, 8, [ranks])
    for stage in range(stages):
        changers = [rank for rank in ranks if stage in places.stages_of(rank)]
        assert [rank for rank in ranks if stage in placement.changed(rank)] == changers
        assert len(set(placement.holders(stage))) == len(placement.holders(stage)) == max(len(changers), min(size, 2))
    for lost in ranks:
        left = [placement.held(rank) for rank in ranks if rank != lost]
        assert size == 1 or plan_moves(left, by_stage(stages, 8, [range(size - 1)]))[1] == ()


@pytest.mark.parametrize(("size", "stages"), in_turn([1, 2, 3, 4, 6, 7], [3, 2]))
def test_every_world_size_ends_with_the_bits_of_one_rank(stages: int, size: int, alone: dict[int, Result]) -> None:
    async def main() -> None:
        trace = Trace()
        async with ElasticWorlds(size) as worlds:
            tasks = [worlds.start(f"m{n}", member(f"m{n}", trace, stages=stages)) for n in range(size)]
            check_run(trace, await asyncio.gather(*tasks), alone[stages])
        assert len(worlds.worlds) == 1

    run_virtual(main())


@pytest.mark.parametrize(("place", "victim", "size"), in_turn(["computed", "reduced", "updated"], range(4), [2, 4]))
def test_a_stage_that_is_lost_anywhere_in_a_step_changes_no_bit(
    size: int, place: str, victim: int, alone: dict[int, Result]
) -> None:
    """With 4 ranks it comes from its replica, with 2 from the neighbour's memory."""
    victim %= size

    async def main() -> None:
        trace = Trace()
        async with ElasticWorlds(size) as worlds:

            def kill(where: str, step: ElasticStep) -> None:
                if (where, step.number) == (place, 3) and worlds.is_running(f"m{victim}"):
                    asyncio.get_running_loop().call_soon(worlds.kill, f"m{victim}")

            tasks = [
                worlds.start(f"m{n}", member(f"m{n}", trace, kill if n == victim else None, stages=2))
                for n in range(size)
            ]
            check_run(trace, await asyncio.gather(*(t for n, t in enumerate(tasks) if n != victim)), alone[2])
        assert [len(world.members) for world in worlds.worlds] == [size, size - 1]

    run_virtual(main())


def test_a_step_that_one_may_have_committed_is_rolled_forward(
    alone: dict[int, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    vote = ElasticStep._vote_with_all  # noqa: SLF001

    async def lose_result(step: ElasticStep) -> Vote:
        result = await vote(step)
        if step.number == 3 and step.began_in == 0 and step.world.rank != 1:
            await asyncio.Event().wait()
        return result

    monkeypatch.setattr(ElasticStep, "_vote_with_all", lose_result)

    async def main() -> None:
        trace = Trace()
        async with ElasticWorlds(3) as worlds:

            def kill(where: str, step: ElasticStep) -> None:
                if step.number == 4:  # step 3 is committed on this rank
                    asyncio.get_running_loop().call_soon(worlds.kill, "m1")

            tasks = [worlds.start(f"m{n}", member(f"m{n}", trace, kill if n == 1 else None)) for n in range(3)]
            check_run(trace, [await tasks[0], await tasks[2]], alone[3])
        assert [world.lineage.step for world in worlds.worlds] == [0, 4]

    run_virtual(main())


@pytest.mark.parametrize("seed", range(chosen(2, soak=100)))
def test_kills_joins_and_drains_at_any_moment_change_no_bit(seed: int, alone: dict[int, Result]) -> None:
    async def main() -> None:
        rng, trace = random.Random(seed), Trace()
        async with ElasticWorlds(4) as worlds:
            for n in range(4):
                worlds.start(f"m{n}", member(f"m{n}", trace, stages=2 + seed % 2))
            count = 4
            await worlds.formed(1)
            for _ in range(6):
                await asyncio.sleep(rng.random() * 0.1)
                present = worlds.present
                if not present or any(task.done() and not task.cancelled() for task in worlds.tasks.values()):
                    break
                fault = rng.choice(["kill", "join", "drain"])
                if fault == "join" or len(present) < 2:
                    worlds.start(f"m{count}", member(f"m{count}", trace, stages=2 + seed % 2))
                    count += 1
                elif fault == "kill":
                    worlds.kill(rng.choice(present))
                else:
                    worlds.drain(rng.choice(present))
            ended = await asyncio.gather(*worlds.tasks.values(), return_exceptions=True)
            failures = [end for end in ended if isinstance(end, Exception)]
            results = [end for end in ended if isinstance(end, Result) and not end.is_drained]
            if any(isinstance(failure, StateLost) for failure in failures):
                assert most_left_at_once(worlds.worlds) > 1
                return
            assert results, failures
            assert not failures
            check_run(trace, results, alone[2 + seed % 2])

    run_virtual(main())


def test_replicas_that_have_not_the_same_bits_are_reported() -> None:
    async def main() -> None:
        async with ElasticWorlds(4) as worlds:

            def flip(where: str, step: ElasticStep) -> None:
                if (where, step.number) == ("updated", 2):
                    sharded = step._job.current_state.sharded  # noqa: SLF001
                    assert sharded is not None
                    sharded.parts.open("optimizer.value", 0).view(np.uint8)[0] ^= 1

            tasks = [
                worlds.start(f"m{n}", member(f"m{n}", Trace(), flip if n == 2 else None, stages=2)) for n in range(4)
            ]
            with pytest.raises(DivergedState, match=r"part 0 of optimizer\.value: rank 2"):
                await tasks[2]

    run_virtual(main())


def test_a_bug_in_a_stage_escapes_where_it_is_and_the_others_go_on(alone: dict[int, Result]) -> None:
    async def main() -> None:
        trace = Trace()

        async def wrong(source: WorldSource) -> Result:
            return await train_pipeline(source, "m3", until=UNTIL, trace=trace, stages=2, on_step=fail)

        def fail(where: str, step: ElasticStep) -> None:
            if (where, step.number) == ("computed", 3):
                pipeline = step._sharded.pipeline  # type: ignore[union-attr]  # noqa: SLF001
                pipeline.stages[1].forward = lambda _: 1 // 0  # type: ignore[method-assign]

        async with ElasticWorlds(4) as worlds:
            tasks = [worlds.start(f"m{n}", member(f"m{n}", trace, stages=2)) for n in range(3)]
            tasks.append(worlds.start("m3", wrong))
            with pytest.raises(ActionFailed, match="division"):
                await tasks[3]
            check_run(trace, await asyncio.gather(*tasks[:3]), alone[2])

    run_virtual(main())


def test_what_a_program_must_not_do_is_a_typed_error() -> None:
    async def main() -> None:
        stages, x = make_stages(2), np.ones((2, 6), np.float32)
        parameters = [parameter for stage in stages for parameter in stage.parameters()]
        async with ap.elastic(portions=2) as job:
            optimizer = Optimizer(parameters, SGD())
            wrongs: list[dict[str, Any]] = [{"zero": 1}, {"codec": "int8"}, {"pipeline": []}]
            for wrong in wrongs:
                with pytest.raises(UsageError, match="leave zero, codec and outer out"):
                    job.state(parameters, optimizer, **{"pipeline": stages, **wrong})
            with pytest.raises(UsageError, match="in their order"):
                job.state(parameters, optimizer, pipeline=stages[::-1])
            with pytest.raises(UsageError, match="one optimizer"):
                job.state(parameters, [], pipeline=stages)
            state = job.state(parameters, optimizer, pipeline=stages)
            async for step in job.steps(state, until=1):
                async with step:
                    with pytest.raises(UsageError, match=r"use step\.run_pipeline"):
                        step.add(0, [])
                    with pytest.raises(UsageError, match=r"use step\.run_pipeline"):
                        await step.reduce()
                    with pytest.raises(UsageError, match="expected sum or mean"):
                        await step.run_pipeline(lambda _: None, lambda _: None, squares, op="max")
                    gradients = await step.run_pipeline(lambda _: x, lambda _: x[:, :4], squares)
                    await step.update(optimizer, gradients, learning_rate=0.1)
        async with ap.elastic(portions=1) as job:
            state = job.state({"w": np.zeros(2)})
            async for step in job.steps(state, until=1):
                async with step:
                    with pytest.raises(UsageError, match="pipeline="):
                        await step.run_pipeline(lambda _: None, lambda _: None, squares)
                    step.add(0, [np.zeros(2)])
                    await step.reduce()

    run_virtual(main())
