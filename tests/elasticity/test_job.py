"""Runs under faults end with the bits of a run without."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.collectives.communicator import Communicator
from asyncpar.elasticity.job_worlds import JobWorlds, StepUnderWay
from asyncpar.elasticity.step import ElasticStep
from asyncpar.elasticity.step_machine import Vote
from asyncpar.elasticity.worlds import WorldSource
from asyncpar.errors import DivergedState, LaunchError, NonFiniteValue, StaleGeneration, UsageError, WorldChanged
from asyncpar.hosts.lineage import Decision
from asyncpar.nn.optimizers import SGD, Optimizer
from asyncpar.nn.parameter import Parameter
from asyncpar.testing import run_virtual
from asyncpar.testing.elastic_worlds import ElasticWorlds
from tests.elasticity.training import PORTIONS, OnStep, Result, Trace, check_equal, train
from tests.soak import chosen

UNTIL = 12


@pytest.fixture(scope="module")
def alone() -> Result:
    """The run without faults, in a world of one."""
    return run_virtual(train(None, until=UNTIL))


Main = Callable[[WorldSource], Coroutine[Any, Any, Result]]


def member(name: str, trace: Trace, on_step: OnStep | None = None) -> Main:
    async def main(source: WorldSource) -> Result:
        return await train(source, name, until=UNTIL, trace=trace, on_step=on_step)

    return main


def check_run(trace: Trace, results: list[Result], alone: Result) -> None:
    for result in results:
        check_equal(result, alone)
    assert sorted(trace.committed) == list(range(UNTIL))
    for step in range(UNTIL):
        assert trace.portions(step) == list(range(PORTIONS)), step


@pytest.mark.parametrize("size", chosen([1, 2, 3, 5, 10], soak=[1, 2, 3, 4, 5, 8, 10]))
def test_every_world_size_ends_with_the_bits_of_one_rank(size: int, alone: Result) -> None:
    async def main() -> None:
        trace = Trace()
        async with ElasticWorlds(size) as worlds:
            tasks = [worlds.start(f"m{n}", member(f"m{n}", trace)) for n in range(size)]
            check_run(trace, await asyncio.gather(*tasks), alone)
        assert len(worlds.worlds) == 1

    run_virtual(main())


@pytest.mark.parametrize("place", ["computed", "reduced", "updated"])
@pytest.mark.parametrize("victim", ["m0", "m2", "m3"])
def test_a_rank_that_is_killed_anywhere_in_a_step_changes_no_bit(place: str, victim: str, alone: Result) -> None:
    async def main() -> None:
        trace = Trace()
        async with ElasticWorlds(4) as worlds:

            def kill(where: str, step: ElasticStep) -> None:
                if (where, step.number) == (place, 5) and worlds.is_running(victim):
                    asyncio.get_running_loop().call_soon(worlds.kill, victim)

            names = [f"m{n}" for n in range(4)]
            tasks = {name: worlds.start(name, member(name, trace, kill if name == victim else None)) for name in names}
            survivors = [task for name, task in tasks.items() if name != victim]
            check_run(trace, await asyncio.gather(*survivors), alone)
            assert tasks[victim].cancelled()
        assert [len(world.members) for world in worlds.worlds] == [4, 3]
        assert worlds.worlds[1].change.left == (victim,)

    run_virtual(main())


@pytest.mark.parametrize("is_killed", [True, False])
def test_who_is_silent_is_not_waited_for_in_a_world_that_is_over_by_a_loss(
    is_killed: bool, alone: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, found = ap.Node.stop, list[tuple[int, int, bool]]()

    async def noted_stop(node: ap.Node) -> None:
        found.append((node.membership.generation, node.rank, node.links.is_revoked))
        await stop(node)

    monkeypatch.setattr(ap.Node, "stop", noted_stop)
    reform, was_revoked = JobWorlds.reform, list[bool]()

    async def reform_late(job: JobWorlds, step: StepUnderWay, error: BaseException | None) -> None:
        if job.rank == 0 or is_killed:  # it learns of the loss, or that the others have reported
            await asyncio.sleep(0.1)
            was_revoked.append(job.is_revoked)
        await reform(job, step, error)

    monkeypatch.setattr(JobWorlds, "reform", reform_late)

    async def main() -> None:
        trace = Trace()
        async with ElasticWorlds(4) as worlds:

            def end(where: str, step: ElasticStep) -> None:
                if (where, step.number) == ("computed", 5) and worlds.is_running("m2"):
                    asyncio.get_running_loop().call_soon(worlds.kill if is_killed else worlds.drain, "m2")

            tasks = [worlds.start(f"m{n}", member(f"m{n}", trace, end if n == 2 else None)) for n in range(4)]
            results = await asyncio.gather(*tasks[:2], *tasks[3:])
            for result in results:
                check_equal(result, alone)

    run_virtual(main())
    assert set(was_revoked) == {True}
    assert sorted(one for one in found if one[:2] != (0, 2)) == [
        *((0, rank, is_killed) for rank in (0, 1, 3)),
        *((1, rank, False) for rank in (0, 1, 2)),
    ]


def test_ranks_go_one_after_another_until_one_is_left(alone: Result) -> None:
    async def main() -> None:
        trace = Trace()
        async with ElasticWorlds(5) as worlds:

            def kill(where: str, step: ElasticStep) -> None:
                name = f"m{step.number // 2}"
                if where == "reduced" and step.number in (2, 4, 6, 8) and worlds.is_running(name):
                    asyncio.get_running_loop().call_soon(worlds.kill, name)

            tasks = [worlds.start(f"m{n}", member(f"m{n}", trace, kill)) for n in (0, 1, 2, 3, 4)]
            result = await tasks[0]
            check_run(trace, [result], alone)
            assert [task.cancelled() for task in tasks[1:]] == [True] * 4

    run_virtual(main())


def test_a_step_that_one_may_have_committed_is_rolled_forward(alone: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank commits and is killed before the others know the result of the vote, for which all have voted."""
    vote = ElasticStep._vote_with_all  # noqa: SLF001

    async def lose_result(step: ElasticStep) -> Vote:
        result = await vote(step)
        if step.number == 5 and step.began_in == 0 and step.world.rank != 1:
            await asyncio.Event().wait()
        return result

    monkeypatch.setattr(ElasticStep, "_vote_with_all", lose_result)

    async def main() -> None:
        trace = Trace()
        async with ElasticWorlds(3) as worlds:

            def kill(where: str, step: ElasticStep) -> None:
                if step.number == 6:  # step 5 is committed on this rank
                    asyncio.get_running_loop().call_soon(worlds.kill, "m1")

            tasks = [worlds.start(f"m{n}", member(f"m{n}", trace, kill if n == 1 else None)) for n in range(3)]
            check_run(trace, [await tasks[0], await tasks[2]], alone)
        assert [(world.decision, world.lineage.step) for world in worlds.worlds[1:]] == [(Decision.ROLL_FORWARD, 6)]

    run_virtual(main())


def test_a_rank_whose_bits_are_wrong_is_reported_by_all(alone: Result) -> None:
    async def main() -> None:
        async with ElasticWorlds(3) as worlds:

            def flip(where: str, step: ElasticStep) -> None:
                if (where, step.number) == ("updated", 4):
                    parameter = next(iter(step._job.current_state.parameters.values()))  # noqa: SLF001
                    assert isinstance(parameter, Parameter)
                    parameter.value[0, 0] = np.nextafter(parameter.value[0, 0], np.float32(9))

            tasks = [worlds.start(f"m{n}", member(f"m{n}", Trace(), flip if n == 2 else None)) for n in range(3)]
            failures = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(failure) for failure in failures] == [DivergedState] * 3
            assert "rank 2: step 5" in str(failures[0])

    run_virtual(main())


def test_members_that_begin_with_other_states_are_refused() -> None:
    async def main() -> None:
        async with ElasticWorlds(2) as worlds:
            tasks = [
                worlds.start("m0", lambda source: train(source, "m0", until=3)),
                worlds.start("m1", lambda source: train(source, "m1", until=3, width=18)),
            ]
            failures = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(failure) for failure in failures] == [asyncio.CancelledError] * 2
            assert "expected the same on all ranks" in str(worlds.lines)

    run_virtual(main())


def test_a_newcomer_with_another_program_is_refused_by_name_and_nobody_else_notices(alone: Result) -> None:
    async def main() -> None:
        trace = Trace()
        async with ElasticWorlds(2) as worlds:
            tasks = [worlds.start(f"m{n}", member(f"m{n}", trace)) for n in range(2)]
            await worlds.formed(1)
            await asyncio.sleep(0.1)
            other = worlds.start("m2", lambda source: train(source, "m2", until=UNTIL, width=18))
            with pytest.raises(UsageError, match=r"'first' is float32\[8, 18\] here and float32\[8, 17\]"):
                await other
            check_run(trace, list(await asyncio.gather(*tasks)), alone)
        assert len(worlds.worlds) == 1

    run_virtual(main())


def test_a_bug_in_the_block_escapes_and_the_others_go_on(alone: Result) -> None:
    async def main() -> None:
        trace = Trace()
        async with ElasticWorlds(3) as worlds:

            def fail(where: str, step: ElasticStep) -> None:
                if (where, step.number) == ("reduced", 4):
                    raise ZeroDivisionError("a bug")

            tasks = [worlds.start(f"m{n}", member(f"m{n}", trace, fail if n == 1 else None)) for n in range(3)]
            with pytest.raises(ZeroDivisionError):
                await tasks[1]
            check_run(trace, [await tasks[0], await tasks[2]], alone)

    run_virtual(main())


def test_a_step_that_fails_again_and_again_in_a_whole_world_is_the_programs_fault() -> None:
    async def main() -> None:
        async def wrong(source: WorldSource) -> None:
            async with ap.elastic(portions=2, source=source) as job:
                state = job.state({"w": np.zeros(2)})
                async for step in job.steps(state, until=3):
                    async with step:
                        if step.world.rank == 1:
                            raise WorldChanged("so it says", generation=step.generation)
                        await step.world.barrier()

        async with ElasticWorlds(2) as worlds:
            tasks = [worlds.start(f"m{n}", wrong) for n in range(2)]
            failures = await asyncio.gather(*tasks, return_exceptions=True)
        assert any(isinstance(failure, LaunchError) and "step 0: it failed" in str(failure) for failure in failures)

    run_virtual(main())


@pytest.mark.parametrize("change", ["join", "kill", "drain"])
def test_a_communicator_that_is_kept_beyond_its_world_is_stale_for_every_operation(change: str) -> None:
    async def main() -> None:
        kept: list[Communicator] = []
        stale: list[Communicator] = []

        def look(where: str, step: ElasticStep) -> None:
            if where == "computed" and step.generation == 0 and not kept:
                kept.append(step.world)
                group = step.world.subgroup((0, 1))
                assert group is not None
                kept.append(group)
            if where == "computed" and step.generation == 1:
                stale[:] = kept

        async with ElasticWorlds(3) as worlds:
            tasks = [worlds.start(f"m{n}", member(f"m{n}", Trace(), look if n == 0 else None)) for n in range(3)]
            await worlds.formed(1)
            await asyncio.sleep(0.1)
            match change:
                case "join":
                    worlds.start("m3", member("m3", Trace()))
                case "kill":
                    worlds.kill("m2")
                case "drain":
                    worlds.drain("m2")
            await tasks[0]
        assert len(stale) == 2
        for comm in stale:
            calls: list[Callable[[], Coroutine[Any, Any, Any]]] = [
                comm.barrier,
                partial(comm.all_reduce, np.zeros(2)),
                partial(comm.all_gather_object, 1),
                partial(comm.send, np.zeros(2), 1),
                partial(comm.recv, 1),
                partial(comm.agree, 1),
                comm.shrink,
            ]
            for call in calls:
                with pytest.raises(StaleGeneration, match="generation 0"):
                    await call()

    run_virtual(main())


def test_what_a_program_must_not_do_is_a_typed_error() -> None:
    async def main() -> None:
        async with ap.elastic(portions=2) as job:
            weight = Parameter("w", np.zeros(2))
            optimizer = Optimizer([weight], SGD())
            state = job.state([weight], optimizer)
            with pytest.raises(UsageError, match="none yet"):
                job.world  # noqa: B018
            steps = job.steps(state, until=9)
            step = await anext(steps)
            async with step:
                step.add(0, {"w": np.ones(2)})
                with pytest.raises(UsageError, match="before"):
                    step.add(0, {"w": np.ones(2)})
                with pytest.raises(UsageError, match="missing 1"):
                    await step.reduce()
                with pytest.raises(UsageError, match="same names"):
                    step.add(1, {"v": np.ones(2)})
            raise AssertionError("a block without reduce is committed")

    with pytest.raises(UsageError, match=r"without `await step\.reduce"):
        run_virtual(main())


async def test_a_step_whose_gradients_are_not_finite_may_be_skipped() -> None:
    async with ap.elastic(portions=1) as job:
        weight = Parameter("w", np.ones(2))
        optimizer = Optimizer([weight], SGD())
        state = job.state([weight], optimizer, skipped=0)
        async for step in job.steps(state, until=3):
            async with step:
                step.add(0, {"w": np.full(2, np.nan if step.number == 1 else 1.0)})
                gradients = await step.reduce()
                try:
                    await step.update(optimizer, gradients, learning_rate=0.25, clip_norm=None)
                except NonFiniteValue:
                    state["skipped"] += 1
        assert (weight.value.tolist(), state["skipped"], state.step) == ([0.5, 0.5], 1, 3)


async def test_steps_are_used_one_at_a_time_and_once() -> None:
    async with ap.elastic(portions=2) as job:
        state = job.state({"w": np.zeros(2)})
        steps = job.steps(state, until=9)
        step = await anext(steps)
        with pytest.raises(UsageError, match="async with step"):
            await anext(steps)
        async with step:
            for portion in step.portions:
                step.add(portion, [np.ones(2)])
            with pytest.raises(UsageError, match="expected sum or mean"):
                await step.reduce("max")
            await step.reduce()
        with pytest.raises(UsageError, match="entered once"):
            async with step:
                pass
        with pytest.raises(UsageError, match="another"):
            await anext(job.steps(job.state({"w": np.zeros(2)}), until=9))
    for wrong in (0, 1 << 17, 1.5):
        with pytest.raises(UsageError, match="portions"):
            ap.elastic(portions=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(chosen(2, soak=100)))
def test_kills_joins_and_drains_at_any_moment_change_no_bit(seed: int, alone: Result) -> None:
    async def main() -> None:
        rng, trace = random.Random(seed), Trace()
        async with ElasticWorlds(3) as worlds:
            for n in range(3):
                worlds.start(f"m{n}", member(f"m{n}", trace))
            count = 3
            await worlds.formed(1)
            for _ in range(6):
                await asyncio.sleep(rng.random() * 0.25)
                present = worlds.present
                if not present or any(task.done() and not task.cancelled() for task in worlds.tasks.values()):
                    break
                fault = rng.choice(["kill", "join", "drain"])
                if fault == "join" or len(present) < 2:
                    worlds.start(f"m{count}", member(f"m{count}", trace))
                    count += 1
                elif fault == "kill":
                    worlds.kill(rng.choice(present))
                else:
                    worlds.drain(rng.choice(present))
            pending = [task for name, task in worlds.tasks.items() if worlds.is_running(name)]
            found = await asyncio.gather(*pending, return_exceptions=True)
            done = [
                task.result() for task in worlds.tasks.values() if not task.cancelled() and task.exception() is None
            ]
            results = [result for result in done if not result.is_drained]
            assert results, found
            failures = [task.exception() for task in worlds.tasks.values() if not task.cancelled() and task.exception()]
            assert not failures
            check_run(trace, results, alone)

    run_virtual(main())


def test_a_world_that_is_over_before_its_members_have_taken_it_is_left(alone: Result) -> None:
    async def main() -> None:
        trace = Trace()
        async with ElasticWorlds(3) as worlds:
            tasks = [worlds.start(f"m{n}", member(f"m{n}", trace)) for n in range(3)]
            await worlds.formed(1)
            worlds.kill("m2")
            check_run(trace, await asyncio.gather(*tasks[:2]), alone)
            assert tasks[2].cancelled()
        assert {generation for _, generation in trace.summed} == {1}, "no step began in the first world"
        assert [world.members for world in worlds.worlds] == [("m0", "m1", "m2"), ("m0", "m1")]

    run_virtual(main())
