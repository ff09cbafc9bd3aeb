"""A joining rank whose program computes otherwise is refused by name, and no world is changed for it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import numpy as np
import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.elasticity.donors import SnapshotShelf
from asyncpar.elasticity.healing import Healing
from asyncpar.elasticity.job import ElasticJob
from asyncpar.elasticity.settings import check_settings
from asyncpar.elasticity.step import ElasticStep
from asyncpar.elasticity.worlds import LoneWorld, WorldSource
from asyncpar.errors import DivergedState, NotFound, UsageError
from asyncpar.hosts.director import ElasticDirector
from asyncpar.hosts.lineage import Lineage, MemberReport
from asyncpar.hosts.messages import ChangePending, MemberDismissed
from asyncpar.hosts.next_world import FormWorld
from asyncpar.nn.optimizers import SGD, Optimizer, Rule
from asyncpar.nn.parameter import Parameter
from asyncpar.parallel.local.outer import OuterConfig
from asyncpar.testing import run_virtual
from asyncpar.testing.elastic_worlds import ElasticWorlds
from tests.elasticity.round_training import RoundResult, train_rounds
from tests.elasticity.sharded_training import train_sharded
from tests.elasticity.test_healing import state_of, step_soon
from tests.elasticity.training import OnStep, Result, check_equal, train
from tests.products import in_turn
from tests.soak import first

UNTIL = 40
Main = Callable[[WorldSource], Coroutine[Any, Any, Result]]


def change_a_bit(step: ElasticStep) -> None:
    """Let the state of this rank be another one, by a last bit, as another library or another rate would."""
    parameter = next(iter(step._job.current_state.parameters.values()))  # noqa: SLF001
    assert isinstance(parameter, Parameter)
    parameter.value[0, 0] = np.nextafter(parameter.value[0, 0], np.float32(9))


def member(name: str, on_step: OnStep | None = None, *, linger: float = 0.0) -> Main:
    async def main(source: WorldSource) -> Result:
        return await train(source, name, until=UNTIL, on_step=on_step, linger=linger)

    return main


def differs_in(*steps: int) -> OnStep:
    """Return what changes a bit in ``steps``, in all without any, of the program that is a newcomer or a member."""

    def on_step(where: str, step: ElasticStep) -> None:
        if where == "updated" and (not steps or step.number in steps):
            change_a_bit(step)

    return on_step


@pytest.fixture(scope="module")
def alone() -> Result:
    return run_virtual(train(None, until=UNTIL))


@pytest.mark.parametrize("delay", first(2, [0.05, 0.33, 0.1, 0.4]))
def test_a_joining_rank_that_computes_otherwise_is_refused_and_nobody_else_notices(delay: float, alone: Result) -> None:
    """Again and again, at any moment of a step: the others stay in their first world."""

    async def main() -> None:
        async with ElasticWorlds(2) as worlds:
            tasks = [worlds.start(f"m{n}", member(f"m{n}")) for n in range(2)]
            await worlds.formed(1)
            for number in range(3):
                await asyncio.sleep(delay)
                other = worlds.start(f"n{number}", member(f"n{number}", differs_in()))
                with pytest.raises(DivergedState, match=r"its step \d+ has another digest than the group's; the prog"):
                    await other
            for result in await asyncio.gather(*tasks):
                check_equal(result, alone)
        assert len(worlds.worlds) == 1

    run_virtual(main())


def test_a_joining_rank_that_computes_otherwise_does_not_end_well_with_the_job(alone: Result) -> None:
    """It repeats the last step when the others have made it, and has no time to join."""

    async def main() -> None:
        other: list[asyncio.Task[Result]] = []

        def join(where: str, step: ElasticStep) -> None:
            if (where, step.number, other) == ("computed", UNTIL - 2, []):
                other.append(worlds.start("n0", member("n0", differs_in())))

        async with ElasticWorlds(2) as worlds:
            tasks = [worlds.start(f"m{n}", member(f"m{n}", join, linger=1.0)) for n in range(2)]
            for result in await asyncio.gather(*tasks):
                check_equal(result, alone)
            with pytest.raises(DivergedState, match=rf"its step {UNTIL - 1} has another digest than the group's"):
                await other[0]
        assert len(worlds.worlds) == 1

    run_virtual(main())


@pytest.mark.parametrize("late", range(3))
def test_a_rank_that_hears_of_a_divergence_last_ends_as_the_others_do(
    late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others end while it compares: that is no change of the world, and none follows."""
    gather = Communicator.all_gather_object

    async def gather_late(world: Communicator, value: object) -> list[object]:
        everyones = await gather(world, value)
        await asyncio.sleep(0.5 * (world.rank == late))
        return everyones

    async def main() -> None:
        async with ElasticWorlds(3) as worlds:
            tasks = [worlds.start(f"m{n}", member(f"m{n}", differs_in(20) if n == 1 else None)) for n in range(3)]
            await worlds.formed(1)
            monkeypatch.setattr(Communicator, "all_gather_object", gather_late)
            for error in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(error, DivergedState), error
        assert len(worlds.worlds) == 1

    run_virtual(main())


def test_a_joining_rank_that_nobody_can_compare_any_more_knows_that_it_was_no_member(
    alone: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It repeats the last step, and the others are gone before it can ask them: what it has may be wrong."""
    prove = Healing.prove

    async def prove_late(healing: Healing, mine: Lineage) -> None:
        await asyncio.sleep(1.0)
        await prove(healing, mine)

    monkeypatch.setattr(Healing, "prove", prove_late)

    async def main() -> None:
        other: list[asyncio.Task[Result]] = []

        def join(where: str, step: ElasticStep) -> None:
            if (where, step.number, other) == ("computed", UNTIL - 2, []):
                other.append(worlds.start("n0", member("n0", differs_in())))

        async with ElasticWorlds(2) as worlds:
            for result in await asyncio.gather(*(worlds.start(f"m{n}", member(f"m{n}", join)) for n in range(2))):
                check_equal(result, alone)
            result = await other[0]
            assert len(result.losses) == UNTIL
            assert result.is_drained
        assert len(worlds.worlds) == 1

    run_virtual(main())


def test_a_rank_that_comes_when_the_job_is_complete_is_not_needed() -> None:
    async def main() -> None:
        async with ElasticWorlds(2) as worlds:
            await asyncio.gather(*(worlds.start(f"m{n}", member(f"m{n}")) for n in range(2)))
            result = await worlds.start("n0", member("n0"))
            assert (result.is_drained, result.losses) == (True, [])
        assert len(worlds.worlds) == 1

    run_virtual(main())


def sharded_member(name: str, **settings: Any) -> Main:
    async def main(source: WorldSource) -> Result:
        return await train_sharded(source, name, until=UNTIL, **settings)

    return main


@pytest.mark.parametrize(
    ("cut", "other"),
    in_turn(
        [{"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 1, "codec": "int8"}],
        [{"learning_rate": 0.02}, {"clip_norm": 1.0}],
    ),
    ids=str,
)
def test_a_joining_rank_that_would_update_its_parts_otherwise_is_refused(
    cut: dict[str, Any], other: dict[str, Any]
) -> None:
    """It has no parts yet to compute: its arguments of ``step.update`` are compared."""

    async def main() -> None:
        async with ElasticWorlds(2) as worlds:
            tasks = [worlds.start(f"m{n}", sharded_member(f"m{n}", **cut)) for n in range(2)]
            await worlds.formed(1)
            await asyncio.sleep(0.1)
            with pytest.raises(DivergedState, match=r"its step \d+ has another digest than the group's"):
                await worlds.start("n0", sharded_member("n0", **cut, **other))
            await asyncio.gather(*tasks, worlds.start("n1", sharded_member("n1", **cut)))
        assert [len(world.members) for world in worlds.worlds] == [2, 3]

    run_virtual(main())


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_members_that_update_their_parts_otherwise_are_reported(zero: int) -> None:
    async def main() -> None:
        async with ElasticWorlds(3) as worlds:
            rates = [0.01, 0.01, 0.02]
            tasks = [
                worlds.start(f"m{n}", sharded_member(f"m{n}", zero=zero, learning_rate=rate))
                for n, rate in enumerate(rates)
            ]
            failures = await asyncio.gather(*tasks, return_exceptions=True)
            for failure in failures:
                assert isinstance(failure, DivergedState)
                assert re.search(r"rank 2 on \S+ has another state after step 0 than the others", str(failure))

    run_virtual(main())


@pytest.mark.parametrize(
    ("other", "kind", "why"),
    [
        ({"counted": 2}, DivergedState, r"its step \d+ has another digest than the group's"),
        ({"outer": OuterConfig(learning_rate=0.5)}, UsageError, r"outer: it is OuterConfig\(.*0.5.*\) here and"),
    ],
)
def test_a_joining_rank_whose_rounds_are_others_is_refused(
    other: dict[str, Any], kind: type[Exception], why: str
) -> None:
    def round_member(name: str, **settings: Any) -> Callable[[WorldSource], Coroutine[Any, Any, RoundResult]]:
        async def main(source: WorldSource) -> RoundResult:
            return await train_rounds(source, name, until=UNTIL, **settings)

        return main

    async def main() -> None:
        async with ElasticWorlds(2) as worlds:
            tasks = [worlds.start(f"m{n}", round_member(f"m{n}")) for n in range(2)]
            await worlds.formed(1)
            await asyncio.sleep(0.3)
            with pytest.raises(kind, match=why):
                await worlds.start("n0", round_member("n0", **other))
            first, second = await asyncio.gather(*tasks)
            assert first.digest == second.digest
        assert len(worlds.worlds) == 1

    run_virtual(main())


def test_a_joining_rank_with_another_rule_of_its_optimizer_is_refused_by_its_name() -> None:
    """Also where its rule is used by itself only, in the inner steps of rounds, or on its own parts."""

    def settings(rule: Rule, **cut: Any) -> Mapping[str, str]:
        parameter = Parameter("weight", np.ones(8, np.float32))
        optimizer = Optimizer([parameter], rule)
        return ElasticJob(portions=2, source=LoneWorld()).state([parameter], optimizer, **cut).settings

    for cut in ({}, {"zero": 1}, {"outer": OuterConfig()}):
        with pytest.raises(UsageError, match=r"optimizers: it is SGD\(.*momentum=0.8.*here and SGD\(.*momentum=0.9"):
            check_settings(settings(SGD(momentum=0.8), **cut), settings(SGD(momentum=0.9), **cut))


def test_a_rank_that_computes_otherwise_once_it_is_a_member_is_reported_by_name_and_no_world_follows() -> None:
    """It is not deterministic: it was equal when it joined."""

    async def main() -> None:
        async with ElasticWorlds(2) as worlds:
            tasks = [worlds.start(f"m{n}", member(f"m{n}")) for n in range(2)]
            await worlds.formed(1)
            await asyncio.sleep(0.1)
            tasks.append(worlds.start("n0", member("n0", differs_in(15))))
            failures = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(failure) for failure in failures] == [DivergedState] * 3
            for failure in failures:
                assert re.search(r"rank 2 on \S+ has another state after step 15 than the others", str(failure))
        assert [len(world.members) for world in worlds.worlds] == [2, 3]

    run_virtual(main())


def test_a_rank_that_computes_otherwise_as_it_waits_for_its_world_is_refused_by_the_director() -> None:
    """It has joined with an equal state, and the next step that it repeats is another one: it never comes in."""
    director = ElasticDirector(1)
    first, second, other = Lineage(3, b"a"), Lineage(4, b"b"), Lineage(4, b"c")
    (formed,) = director.arrive("a", first, 0.0)
    assert isinstance(formed, FormWorld)
    director.ready("a", 0, "a:1")
    assert director.arrive("n", first, 1.0) == [ChangePending(0)]
    director.progress("n", other, 1.1)
    commands = director.report("a", MemberReport(generation=0, lineage=second), 1.2)
    evicted = [command for command in commands if isinstance(command, MemberDismissed)]
    why = "its step 3 has another digest than the group's; the program or its libraries differ"
    assert evicted == [MemberDismissed("n", why, is_refused=True)]
    assert director.members == ("a",)
    director.ready("a", 1, "a:1")
    assert director.progress("n", Lineage(5, b"d"), 1.3) == [], "it waits for nothing any more"
    assert director.tick(60.0) == []


def test_a_donor_answers_with_its_lineage_once_it_has_committed_the_step() -> None:
    async def main() -> None:
        state, shelf = state_of(3.0), SnapshotShelf()
        shelf.attach(state)
        pinning = asyncio.create_task(shelf.pin(0))
        await step_soon(state, shelf)
        found = await pinning
        asking = asyncio.create_task(shelf.lineage(found.pin, 2))
        before = await state.lineage()
        await step_soon(state, shelf)
        assert await asking == await state.lineage() != before
        assert await shelf.lineage(found.pin, 1) == before
        with pytest.raises(NotFound, match="the lineage of step 0 was not kept"):
            await shelf.lineage(found.pin, 0)
        late = asyncio.create_task(shelf.lineage(found.pin, 3))
        await asyncio.sleep(0)
        await shelf.close("the job has ended there")
        with pytest.raises(NotFound, match="the job has ended there"):
            await late
        assert await shelf.lineage(found.pin, 2) == await state.lineage(), "who was asked before the end answers"

    run_virtual(main())
