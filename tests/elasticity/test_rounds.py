"""Rounds of DiLoCo: no rank waits for a lost or late one, and with a quorum of all the bits are those of one rank."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.elasticity.rounds import ElasticRound
from asyncpar.elasticity.worlds import WorldSource
from asyncpar.errors import NonFiniteValue, StateLost, UsageError
from asyncpar.nn.half import HalfInitializer
from asyncpar.nn.optimizers import SGD, Optimizer
from asyncpar.nn.parameter import Parameter
from asyncpar.parallel.local.outer import OuterConfig, OuterOptimizer
from asyncpar.testing import run_virtual
from asyncpar.testing.elastic_worlds import ElasticWorlds
from tests.elasticity.round_training import STEPS, WORKERS, RoundResult, train_rounds
from tests.elasticity.training import most_left_at_once
from tests.soak import chosen

UNTIL = 6
Pause = Callable[[str, ElasticRound, int], float]
Main = Callable[[WorldSource], Coroutine[Any, Any, RoundResult]]


@pytest.fixture(scope="module")
def alone() -> RoundResult:
    """The run without faults, in a world of one."""
    return run_virtual(train_rounds(None, until=UNTIL))


def member(name: str, **how: Any) -> Main:
    async def main(source: WorldSource) -> RoundResult:
        return await train_rounds(source, name, until=UNTIL, **how)

    return main


def check_equal(results: list[RoundResult], wanted: RoundResult) -> None:
    for result in results:
        assert result.parameters == wanted.parameters
        assert result.digest == wanted.digest
        assert all(wanted.losses[number] == loss for number, loss in result.losses.items())


def test_a_worker_alone_comes_to_what_the_outer_optimizer_does() -> None:
    async def main() -> tuple[list[float], list[float]]:
        weight, same = Parameter("w", np.ones(3)), Parameter("w", np.ones(3))
        inner, outer = Optimizer([weight], SGD()), OuterOptimizer([same], OuterConfig())
        async with ap.elastic(portions=1) as job:
            state = job.state([weight], inner, outer=OuterConfig())
            async for current in job.rounds(state, steps=2, until=3):
                async with current:
                    with current.worker(0) as worker:
                        for step in range(2):
                            weight.grad = np.full(3, 1.0 + step) * weight.value
                            worker.optimizer.step(0.1)
        for _ in range(3):
            for step in range(2):
                same.value -= 0.1 * (1.0 + step) * same.value
            outer.measure()
            outer.advance()
        return weight.value.tolist(), same.value.tolist()

    ours, theirs = run_virtual(main())
    assert ours == theirs


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_every_world_size_ends_with_the_bits_of_one_rank(size: int, alone: RoundResult) -> None:
    async def main() -> None:
        async with ElasticWorlds(size) as worlds:
            tasks = [worlds.start(f"m{n}", member(f"m{n}")) for n in range(size)]
            check_equal(await asyncio.gather(*tasks), alone)
        assert len(worlds.worlds) == 1

    run_virtual(main())


@pytest.mark.parametrize("quorum", [0.5, 1.0])
@pytest.mark.parametrize("victim", ["m0", "m2"])
def test_a_rank_lost_amid_inner_steps_stops_nobody(victim: str, quorum: float, alone: RoundResult) -> None:
    async def main() -> None:
        trained: list[tuple[str, int, int]] = []
        ends: dict[int, float] = {}

        def pause(name: str, current: ElasticRound, portion: int) -> float:
            trained.append((name, current.number, portion))
            ends[current.number] = asyncio.get_running_loop().time()
            if (name, current.number) == (victim, 2) and worlds.is_running(victim):
                asyncio.get_running_loop().call_later(0.005, worlds.kill, victim)
            return 0.01

        async with ElasticWorlds(4) as worlds:
            tasks = {f"m{n}": worlds.start(f"m{n}", member(f"m{n}", pause=pause, quorum=quorum)) for n in range(4)}
            results = [await task for name, task in tasks.items() if name != victim]
        assert [len(world.members) for world in worlds.worlds] == [4, 3]
        assert [result.digest for result in results] == [results[0].digest] * 3
        lost = int(victim[1])
        for name, result in zip([name for name in tasks if name != victim], results, strict=True):
            mine = int(name[1])
            assert trained.count((name, 2, mine)) == STEPS  # nothing is trained again
            assert result.contributed[2] == (4 if quorum == 1.0 else 3)
        again = [name for name, number, portion in trained if (number, portion) == (2, lost) and name != victim]
        if quorum == 1.0:
            assert len(again) == STEPS
            check_equal(results, alone)
        else:
            assert again == []
            assert ends[2] - ends[1] < 2 * (ends[1] - ends[0])  # as long as a round without a loss

    run_virtual(main())


@pytest.mark.parametrize(
    ("victims", "members"),
    [(["m1"], ("m0", "m4", "m2", "m3")), (["m0", "m2"], ("m4", "m1", "m3")), (["m3", "m1"], ("m0", "m4", "m2"))],
)
def test_a_newcomer_that_takes_the_place_of_a_lost_rank_trains_nothing_that_others_have(
    victims: list[str], members: tuple[str, ...], alone: RoundResult
) -> None:
    async def main() -> None:
        trained: set[tuple[str, int, int]] = set()
        newcomers: list[asyncio.Task[RoundResult]] = []

        def pause(name: str, current: ElasticRound, portion: int) -> float:
            if (name, current.number, newcomers) == ("m0", 1, []):  # it repeats round 1, and comes in after round 2
                newcomers.append(worlds.start("m4", member("m4", pause=pause)))
            if (name, current.number) == ("m0", 2) and ("m0", 2, portion) not in trained:
                for victim in victims:
                    asyncio.get_running_loop().call_later(0.45, worlds.kill, victim)
            trained.add((name, current.number, portion))
            return 0.1

        async with ElasticWorlds(4) as worlds:
            tasks = {f"m{n}": worlds.start(f"m{n}", member(f"m{n}", pause=pause)) for n in range(4)}
            results = [await task for name, task in tasks.items() if name not in victims]
            check_equal([*results, await newcomers[0]], alone)
        assert [world.members for world in worlds.worlds] == [("m0", "m1", "m2", "m3"), members]
        assert worlds.worlds[1].change.is_by_loss
        by_survivors = sorted(portion for name, number, portion in trained if number == 2 and name not in victims)
        assert by_survivors == [0, 1, 2, 3], "each once"

    run_virtual(main())


def test_who_is_late_is_left_out_and_goes_on_from_the_new_point() -> None:
    async def main() -> None:
        def pause(name: str, current: ElasticRound, portion: int) -> float:
            return 5.0 if (name, current.number) == ("m1", 2) else 0.01

        async with ElasticWorlds(4) as worlds:
            start = asyncio.get_running_loop().time()
            tasks = [worlds.start(f"m{n}", member(f"m{n}", pause=pause, quorum=0.5, grace=0.2)) for n in range(4)]
            results = await asyncio.gather(*tasks)
            assert asyncio.get_running_loop().time() - start < 3.0
        for result in results:
            assert result.contributed == {0: 4, 1: 4, 2: 3, 3: 4, 4: 4, 5: 4}
            assert result.digest == results[0].digest
            assert result.parameters == results[0].parameters
        assert len(worlds.worlds) == 1

    run_virtual(main())


def test_who_is_late_within_the_grace_is_waited_for(alone: RoundResult) -> None:
    async def main() -> None:
        def pause(name: str, current: ElasticRound, portion: int) -> float:
            return 0.04 if (name, current.number) == ("m1", 2) else 0.01

        async with ElasticWorlds(4) as worlds:
            tasks = [worlds.start(f"m{n}", member(f"m{n}", pause=pause, quorum=0.5)) for n in range(4)]
            check_equal(await asyncio.gather(*tasks), alone)

    run_virtual(main())


def test_without_a_quorum_what_is_missing_is_trained_and_nothing_else(alone: RoundResult) -> None:
    async def main() -> None:
        trained: list[tuple[str, int, int]] = []

        def pause(name: str, current: ElasticRound, portion: int) -> float:
            trained.append((name, current.number, portion))
            if (name, current.number) == ("m1", 2) and worlds.is_running("m1"):
                for victim in ("m1", "m3"):
                    asyncio.get_running_loop().call_later(0.005, worlds.kill, victim)
            return 0.01

        async with ElasticWorlds(4) as worlds:
            tasks = [worlds.start(f"m{n}", member(f"m{n}", pause=pause, quorum=0.75)) for n in range(4)]
            results = [await tasks[0], await tasks[2]]
        check_equal(results, alone)
        assert [result.contributed[2] for result in results] == [4, 4]
        assert [result.attempts for result in results] == [UNTIL + 1] * 2
        for name, own in (("m0", 0), ("m2", 2)):
            assert trained.count((name, 2, own)) == STEPS

    run_virtual(main())


@pytest.mark.parametrize("seed", range(chosen(3, soak=100)))
def test_kills_joins_and_drains_at_any_moment_change_no_bit(seed: int, alone: RoundResult) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        quorum = 1.0 if seed % 2 else 0.5

        def pause(name: str, current: ElasticRound, portion: int) -> float:
            return rng.random() * 0.02

        how: dict[str, Any] = {"pause": pause, "quorum": quorum, "grace": 0.05}
        async with ElasticWorlds(3) as worlds:
            for n in range(3):
                worlds.start(f"m{n}", member(f"m{n}", **how))
            count = 3
            await worlds.formed(1)
            for _ in range(6):
                await asyncio.sleep(rng.random() * 0.2)
                present = worlds.present
                if not present or any(task.done() and not task.cancelled() for task in worlds.tasks.values()):
                    break
                fault = rng.choice(["kill", "join", "drain"])
                if fault == "join" or len(present) < 2:
                    worlds.start(f"m{count}", member(f"m{count}", **how))
                    count += 1
                elif fault == "kill":
                    worlds.kill(rng.choice(present))
                else:
                    worlds.drain(rng.choice(present))
            ended = await asyncio.gather(*worlds.tasks.values(), return_exceptions=True)
            failures = [end for end in ended if isinstance(end, Exception)]
            results = [end for end in ended if isinstance(end, RoundResult) and not end.is_drained]
            if any(isinstance(failure, StateLost) for failure in failures):
                assert most_left_at_once(worlds.worlds) > 1
                return
            assert results, failures
            assert not failures
            check_equal(results, alone if quorum == 1.0 else results[0])

    run_virtual(main())


def test_a_bug_in_a_worker_escapes_and_the_others_go_on(alone: RoundResult) -> None:
    async def main() -> None:
        def pause(name: str, current: ElasticRound, portion: int) -> float:
            if (name, current.number) == ("m1", 2):
                raise ZeroDivisionError("a bug")
            return 0.01

        async with ElasticWorlds(3) as worlds:
            tasks = [worlds.start(f"m{n}", member(f"m{n}", pause=pause)) for n in range(3)]
            with pytest.raises(ZeroDivisionError):
                await tasks[1]
            check_equal([await tasks[0], await tasks[2]], alone)

    run_virtual(main())


def test_an_outer_step_that_is_not_finite_is_raised_on_all_ranks() -> None:
    async def train(source: WorldSource) -> None:
        weight = Parameter("w", np.ones(3))
        async with ap.elastic(portions=2, source=source) as job:
            state = job.state([weight], Optimizer([weight], SGD()), outer=OuterConfig())
            async for current in job.rounds(state, steps=1, until=3):
                async with current:
                    for portion in current.portions:
                        with current.worker(portion):
                            weight.value[0] = np.inf if portion else 0.0

    async def main() -> None:
        async with ElasticWorlds(2) as worlds:
            tasks = [worlds.start(f"m{n}", train) for n in range(2)]
            failures = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(failure) for failure in failures] == [NonFiniteValue] * 2

    run_virtual(main())


def test_what_a_program_must_not_do_is_a_typed_error() -> None:
    async def main() -> None:
        weight = Parameter("w", np.ones(3))
        optimizer = Optimizer([weight], SGD())
        async with ap.elastic(portions=2) as job:
            for wrong in ({"zero": 1}, {"codec": "int8"}):
                with pytest.raises(UsageError, match="leave zero and codec out"):
                    job.state([weight], optimizer, outer=OuterConfig(), **wrong)
            half = HalfInitializer.from_seed(1).normal("h", (2,), std=1.0)
            with pytest.raises(UsageError, match="one dtype"):
                job.state([half], Optimizer([half], SGD()), outer=OuterConfig())
            state = job.state([weight], optimizer, outer=OuterConfig())
            with pytest.raises(UsageError, match="use rounds"):
                await anext(job.steps(state, until=1))
            with pytest.raises(UsageError, match="outer=OuterConfig"):
                await anext(job.rounds(job.state({"v": np.ones(2)}), steps=1, until=1))
            bads: list[dict[str, Any]] = [{"steps": 0}, {"quorum": 0.0}, {"quorum": 1.5}, {"grace": -1.0}]
            for bad in bads:
                with pytest.raises(UsageError, match=next(iter(bad))):
                    await anext(job.rounds(state, **{"steps": 1, "until": 1, **bad}))
            async for current in job.rounds(state, steps=1, until=1):
                with pytest.raises(UsageError, match="async with round"):
                    current.worker(0)
                async with current:
                    with pytest.raises(UsageError, match="expected one of"):
                        current.worker(2)
                    with current.worker(0), pytest.raises(UsageError, match="wait"), current.worker(1):
                        pass
                    assert current.portions == tuple(range(WORKERS // 2))

    with pytest.raises(UsageError, match=r"without workers of the portions \[1\]"):
        run_virtual(main())
