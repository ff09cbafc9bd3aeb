"""States whose parts are spread over the ranks, and residuals of codecs: the bits of one rank in all worlds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.elasticity import transfer
from asyncpar.elasticity.step import ElasticStep
from asyncpar.elasticity.step_machine import Vote
from asyncpar.elasticity.worlds import WorldSource
from asyncpar.errors import DivergedState, NonFiniteValue, StateLost, UsageError
from asyncpar.hosts.lineage import Decision
from asyncpar.nn.half import HalfInitializer, HalfParameter
from asyncpar.nn.optimizers import SGD, Adam, Optimizer
from asyncpar.nn.parameter import Parameter
from asyncpar.testing import run_virtual
from asyncpar.testing.elastic_worlds import ElasticWorlds
from tests.elasticity.sharded_training import train_sharded
from tests.elasticity.training import PORTIONS, OnStep, Result, Trace, most_left_at_once
from tests.products import in_turn
from tests.soak import chosen

UNTIL = 8
CUTS: dict[str, dict[str, Any]] = {
    "zero1": {"zero": 1, "clip_norm": 20.0},
    "zero2": {"zero": 2, "clip_norm": 20.0},
    "zero3": {"zero": 3},
    "int8": {"codec": "int8"},
    "topk, kept in int8": {"codec": "topk:0.1", "residual_codec": "int8"},
    "randomk, zero2": {"codec": "randomk:0.2+bf16", "zero": 2},
    "int4, zero3": {"codec": "int4", "residual_codec": "bf16", "zero": 3},
}
cuts = pytest.mark.parametrize("cut", CUTS)
some_cuts = pytest.mark.parametrize("cut", chosen(list(CUTS)[::2], soak=list(CUTS)))
other_cuts = pytest.mark.parametrize("cut", chosen(list(CUTS)[1::2], soak=list(CUTS)))


WANTED: dict[str, Result] = {}


@pytest.fixture(scope="module", autouse=True)
def alone() -> None:
    """Make the runs without faults, in a world of one."""
    WANTED.update({cut: run_virtual(train_sharded(None, until=UNTIL, **CUTS[cut])) for cut in CUTS})


Main = Callable[[WorldSource], Coroutine[Any, Any, Result]]


def member(cut: str, name: str, trace: Trace, on_step: OnStep | None = None) -> Main:
    async def main(source: WorldSource) -> Result:
        return await train_sharded(source, name, until=UNTIL, trace=trace, on_step=on_step, **CUTS[cut])

    return main


def check_run(trace: Trace, results: list[Result], cut: str) -> None:
    wanted = WANTED[cut]
    for result in results:
        assert result.losses == wanted.losses
        if result.parameters or CUTS[cut].get("zero") != 3:  # a newcomer may come too late for a step of its own
            assert result.parameters == wanted.parameters
        assert result.digest == wanted.digest
    assert sorted(trace.committed) == list(range(UNTIL))
    for step in range(UNTIL):
        assert trace.portions(step) == list(range(PORTIONS)), step


@pytest.mark.parametrize(("cut", "size"), in_turn(CUTS, chosen([2, 3, 1], soak=[1, 2, 3, 4, 10])))
def test_every_world_size_ends_with_the_bits_of_one_rank(size: int, cut: str) -> None:
    async def main() -> None:
        trace = Trace()
        async with ElasticWorlds(size) as worlds:
            tasks = [worlds.start(f"m{n}", member(cut, f"m{n}", trace)) for n in range(size)]
            check_run(trace, await asyncio.gather(*tasks), cut)
        assert len(worlds.worlds) == 1

    run_virtual(main())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sharded_optimizers_come_to_the_bits_of_whole_ones(stage: int) -> None:
    whole = run_virtual(train_sharded(None, until=UNTIL))
    assert run_virtual(train_sharded(None, until=UNTIL, zero=stage)).parameters == whole.parameters


@pytest.mark.parametrize(("cut", "place", "victim"), in_turn(CUTS, ["computed", "reduced", "updated"], ["m0", "m2"]))
def test_a_rank_that_is_killed_anywhere_in_a_step_changes_no_bit(place: str, victim: str, cut: str) -> None:
    async def main() -> None:
        trace = Trace()
        async with ElasticWorlds(4) as worlds:

            def kill(where: str, step: ElasticStep) -> None:
                if (where, step.number) == (place, 3) and worlds.is_running(victim):
                    asyncio.get_running_loop().call_soon(worlds.kill, victim)

            names = [f"m{n}" for n in range(4)]
            tasks = {n: worlds.start(n, member(cut, n, trace, kill if n == victim else None)) for n in names}
            check_run(trace, await asyncio.gather(*(tasks[name] for name in names if name != victim)), cut)
        assert [len(world.members) for world in worlds.worlds] == [4, 3]

    run_virtual(main())


@some_cuts
def test_ranks_go_one_after_another_until_one_is_left_and_others_come(cut: str) -> None:
    async def main() -> None:
        trace = Trace()
        async with ElasticWorlds(4) as worlds:

            def kill(where: str, step: ElasticStep) -> None:
                name = f"m{step.number}"
                if where == "reduced" and 1 <= step.number <= 3 and worlds.is_running(name):
                    asyncio.get_running_loop().call_soon(worlds.kill, name)
                if where == "updated" and step.number == 4 and "m4" not in worlds.tasks:
                    for name in ("m4", "m5"):
                        worlds.start(name, member(cut, name, trace))

            first, *_ = [worlds.start(f"m{n}", member(cut, f"m{n}", trace, kill)) for n in range(4)]
            results = [await first]
            results += await asyncio.gather(*(worlds.tasks[name] for name in ("m4", "m5")))
            check_run(trace, results, cut)
        assert worlds.worlds[-1].members[0] == "m0"
        assert len(worlds.worlds[3].members) == 1
        assert worlds.worlds[4].change.joined

    run_virtual(main())


@other_cuts
def test_a_step_that_one_may_have_committed_is_rolled_forward(cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
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

            tasks = [worlds.start(f"m{n}", member(cut, f"m{n}", trace, kill if n == 1 else None)) for n in range(3)]
            if CUTS[cut].get("zero") == 3:  # it waits for the others to gather: nothing of step 4 is called
                await asyncio.sleep(1.0)
                worlds.kill("m1")
            check_run(trace, [await tasks[0], await tasks[2]], cut)
        assert [(world.decision, world.lineage.step) for world in worlds.worlds[1:]] == [(Decision.ROLL_FORWARD, 4)]

    run_virtual(main())


@pytest.mark.parametrize("seed", range(chosen(1, soak=50)))
@cuts
def test_kills_joins_and_drains_at_any_moment_change_no_bit(seed: int, cut: str) -> None:
    """But where two that held the same parts are gone at once: then all survivors are notified."""

    async def main() -> None:
        rng, trace = random.Random(f"{seed} {cut}"), Trace()
        async with ElasticWorlds(3) as worlds:
            for n in range(3):
                worlds.start(f"m{n}", member(cut, f"m{n}", trace))
            count = 3
            await worlds.formed(1)
            for _ in range(6):
                await asyncio.sleep(rng.random() * 0.2)
                present = worlds.present
                if not present or any(task.done() and not task.cancelled() for task in worlds.tasks.values()):
                    break
                fault = rng.choice(["kill", "join", "drain"])
                if fault == "join" or len(present) < 2:
                    worlds.start(f"m{count}", member(cut, f"m{count}", trace))
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
                assert not results
                return
            assert results, failures
            assert not failures
            check_run(trace, results, cut)

    run_virtual(main())


@pytest.mark.parametrize("cut", ["zero1", "int8"])
def test_when_both_that_hold_a_part_are_lost_all_others_learn_the_step_to_go_back_to(cut: str) -> None:
    async def main() -> None:
        async with ElasticWorlds(4) as worlds:

            def kill(where: str, step: ElasticStep) -> None:
                if (where, step.number) == ("reduced", 3) and worlds.is_running("m1"):
                    for name in ("m1", "m2"):
                        asyncio.get_running_loop().call_soon(worlds.kill, name)

            tasks = [worlds.start(f"m{n}", member(cut, f"m{n}", Trace(), kill if n == 1 else None)) for n in range(4)]
            for task in (tasks[0], tasks[3]):
                with pytest.raises(StateLost, match="checkpoint of step 3 or before") as raised:
                    await task
                assert (raised.value.step, raised.value.parts) == (3, (2, 3))

    run_virtual(main())


@pytest.mark.parametrize("cut", ["zero1", "int8", "zero3"])
def test_all_but_one_are_drained_at_once_and_nothing_is_lost(cut: str) -> None:
    async def main() -> None:
        trace = Trace()
        async with ElasticWorlds(4) as worlds:
            tasks = [worlds.start(f"m{n}", member(cut, f"m{n}", trace)) for n in range(4)]
            await worlds.formed(1)
            await asyncio.sleep(0.05)
            for name in ("m0", "m1", "m2"):
                worlds.drain(name)
            results = await asyncio.gather(*tasks)
            assert [result.is_drained for result in results] == [True, True, True, False]
            check_run(trace, [results[3]], cut)

    run_virtual(main())


@pytest.mark.parametrize("cut", ["zero1", "int8"])
def test_who_is_last_to_know_that_all_is_done_needs_no_part_of_those_who_have_left(
    cut: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vote = ElasticStep._vote_with_all  # noqa: SLF001

    async def lose_result(step: ElasticStep) -> Vote:
        result = await vote(step)
        if step.number == UNTIL - 1 and step.world.rank == 0:
            await asyncio.Event().wait()
        return result

    monkeypatch.setattr(ElasticStep, "_vote_with_all", lose_result)

    async def main() -> None:
        trace = Trace()
        async with ElasticWorlds(3) as worlds:
            tasks = [worlds.start(f"m{n}", member(cut, f"m{n}", trace)) for n in range(3)]
            check_run(trace, await asyncio.gather(*tasks), cut)
        assert worlds.worlds[-1].members == ("m0",)

    run_virtual(main())


def test_two_that_hold_no_part_together_may_be_lost_at_once() -> None:
    async def main() -> None:
        trace = Trace()
        async with ElasticWorlds(4) as worlds:

            def kill(where: str, step: ElasticStep) -> None:
                if (where, step.number) == ("reduced", 3) and worlds.is_running("m1"):
                    for name in ("m1", "m3"):
                        asyncio.get_running_loop().call_soon(worlds.kill, name)

            tasks = [worlds.start(f"m{n}", member("zero3", f"m{n}", trace, kill if n == 1 else None)) for n in range(4)]
            check_run(trace, [await tasks[0], await tasks[2]], "zero3")

    run_virtual(main())


def test_a_part_that_comes_with_other_bits_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked = transfer._unpacked  # noqa: SLF001

    def damaged(*what: Any) -> Any:
        found = unpacked(*what)
        for array in list(found.values())[:1]:
            array.view(np.uint8)[0] ^= 1
        return found

    monkeypatch.setattr(transfer, "_unpacked", damaged)

    async def main() -> None:
        async with ElasticWorlds(2) as worlds:
            tasks = [worlds.start(f"m{n}", member("zero1", f"m{n}", Trace())) for n in range(2)]
            await asyncio.wait(tasks)
            with pytest.raises(DivergedState, match=r"of optimizer\.first: it came with other bits"):
                await tasks[1]

    run_virtual(main())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_half_precision_keeps_sharded_masters(stage: int) -> None:
    async def train(source: WorldSource | None) -> tuple[bytes, bytes]:
        weight = HalfInitializer.from_seed(1).normal("w", (5, 7), std=1.0)
        assert isinstance(weight, HalfParameter)
        optimizer = Optimizer([weight], Adam())
        async with ap.elastic(portions=4, source=source) as job:
            state = job.state([weight], optimizer, zero=stage)
            async for step in job.steps(state, until=4):
                async with step:
                    for portion in step.portions:
                        noise = step.rng(portion).standard_normal(weight.shape).astype(weight.storage)
                        step.add(portion, [noise])
                    await step.update(optimizer, await step.reduce("mean"), learning_rate=0.1)
                    if stage == 3:
                        await step.gather()
                    value = weight.stored.tobytes()
            return value, (await state.lineage()).digest

    async def main() -> None:
        wanted = await train(None)
        async with ElasticWorlds(3) as worlds:
            tasks = [worlds.start(f"m{n}", train) for n in range(3)]
            assert await asyncio.gather(*tasks) == [wanted] * 3

    run_virtual(main())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_that_are_not_finite_are_refused_everywhere_and_by_newcomers_too(stage: int) -> None:
    async def train(source: WorldSource) -> tuple[int, bytes]:
        weight = Parameter("w", np.ones(8))
        optimizer = Optimizer([weight], SGD(momentum=0.9))
        async with ap.elastic(portions=4, source=source) as job:
            state = job.state([weight], optimizer, zero=stage, skipped=0)
            async for step in job.steps(state, until=12):
                async with step:
                    for portion in step.portions:
                        is_odd = step.number % 2 == 1 and portion == 2
                        step.add(portion, [np.full(8, np.inf if is_odd else 1.0)])
                    await asyncio.sleep(0.05)
                    gradients = await step.reduce("mean")
                    try:
                        await step.update(optimizer, gradients, learning_rate=0.1)
                    except NonFiniteValue:
                        state["skipped"] += 1
            return state["skipped"], (await state.lineage()).digest

    async def main() -> None:
        async with ElasticWorlds(2) as worlds:
            tasks = [worlds.start(f"m{n}", train) for n in range(2)]
            await worlds.formed(1)
            await asyncio.sleep(0.2)
            tasks.append(worlds.start("m2", train))
            results = await asyncio.gather(*tasks)
        assert results == [results[0]] * 3
        assert results[0][0] == 6
        assert len(worlds.worlds) == 2

    run_virtual(main())


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    async def main() -> None:
        async with ap.elastic(portions=2) as job:
            weight, other = Parameter("w", np.ones(4)), Parameter("v", np.ones(4, np.float32))
            optimizer = Optimizer([weight], SGD())
            for wrong, match in (
                ({"zero": 4}, "0 to 3"),
                ({"zero": True}, "0 to 3"),
                ({"codec": "powersgd:2"}, "rounds"),
                ({"codec": "int7"}, "expected one of"),
                ({"residual_codec": "int8"}, "give codec too"),
                ({"codec": "int8", "residual_codec": "powersgd:1"}, "residual_codec"),
                ({"codec": "int8"}, "w is float64"),
            ):
                with pytest.raises(UsageError, match=match):
                    job.state([weight], optimizer, **wrong)
            with pytest.raises(UsageError, match="one optimizer"):
                job.state([weight, other], [optimizer, Optimizer([other], SGD())], zero=1)
            with pytest.raises(UsageError, match="one dtype"):
                job.state([weight, other], Optimizer([weight, other], SGD()), zero=1)
            with pytest.raises(UsageError, match="this name already"):
                job.state([other], codec="int8", residual=1)

    run_virtual(main())


def test_what_a_program_must_not_do_with_parts_is_a_typed_error() -> None:
    async def main() -> None:
        async with ap.elastic(portions=1) as job:
            weight = Parameter("w", np.ones(4, np.float32))
            optimizer = Optimizer([weight], SGD())
            state = job.state([weight], optimizer, zero=2, codec="int8")
            async for step in job.steps(state, until=1):
                async with step:
                    for wrong, match in (
                        ({"v": np.ones(4, np.float32)}, "missing w"),
                        ([np.ones(5, np.float32)], "expected \\[4\\]"),
                        ([np.full(4, np.nan, np.float32)], "finite"),
                        ([np.ones(4)], "same names"),
                    ):
                        with pytest.raises(UsageError, match=match):
                            step.add(0, wrong)
                    with pytest.raises(UsageError, match="not sharded"):
                        await step.gather()
                    step.add(0, [np.ones(4, np.float32)])
                    gradients = await step.reduce()
                    with pytest.raises(UsageError, match=r"what step\.reduce"):
                        await step.update(optimizer, [np.ones(4, np.float32)], learning_rate=0.1)
                    await step.update(optimizer, gradients, learning_rate=0.1)
                    with pytest.raises(UsageError, match="once in a step"):
                        await step.update(optimizer, gradients, learning_rate=0.1)
            assert weight.value.tolist() == pytest.approx([0.9] * 4)

    run_virtual(main())
