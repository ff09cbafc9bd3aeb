"""Actors of an elastic job outlive worlds: they keep their objects, start again elsewhere, and answer once."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.actors.runtime.actor import endpoint
from asyncpar.actors.supervision.policy import Backoff, Intensity
from asyncpar.elasticity.actor_refs import ElasticMesh
from asyncpar.elasticity.elastic_actor import ElasticActor
from asyncpar.elasticity.job import ElasticJob
from asyncpar.elasticity.worlds import WorldSource
from asyncpar.errors import (
    ActorDown,
    OperationMismatch,
    PeerError,
    PeerLost,
    RemoteError,
    StaleGeneration,
    UsageError,
    WorldChanged,
)
from asyncpar.hosts.messages import WorldChange
from asyncpar.nn.optimizers import SGD, Optimizer
from asyncpar.nn.parameter import Parameter
from asyncpar.testing import local_world, run_virtual
from asyncpar.testing.elastic_worlds import ElasticWorlds
from tests.soak import chosen

LIVES: list[str] = []


@pytest.fixture(autouse=True)
def no_lives() -> None:
    LIVES.clear()


class Tally(ElasticActor):
    """Counts, and saves before it answers."""

    def __init__(self, start: int = 0) -> None:
        self.count = start
        self.worlds: list[int] = []

    async def on_start(self) -> None:
        LIVES.append(f"start {self.count}")

    async def on_stop(self) -> None:
        LIVES.append(f"stop {self.count}")

    async def on_world(self, change: WorldChange) -> None:
        self.worlds.append(change.generation)

    def state(self) -> object:
        return {"count": self.count}

    def restore(self, state: Any) -> None:
        self.count = state["count"]

    @endpoint
    async def add(self, n: int) -> int:
        self.count += n
        await self.save()
        return self.count

    @endpoint
    async def forget(self, n: int) -> None:
        self.count += n

    @endpoint
    async def seen(self) -> list[int]:
        return self.worlds

    @endpoint
    async def slow(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "done"

    @endpoint
    async def fail(self) -> None:
        raise RuntimeError("broken")

    @endpoint
    async def ask_other(self, name: str) -> int:
        return cast(int, await self.named(name).add(1))


@dataclass
class Run:
    """What all members of a run have seen."""

    answers: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    changes: dict[str, list[str]] = field(default_factory=dict)
    places: dict[int, int | None] = field(default_factory=dict)
    jobs: dict[str, ElasticJob] = field(default_factory=dict)
    killed: list[str] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    """What had been answered when a rank was killed."""


InStep = Callable[[str, ElasticJob, Any, int], Coroutine[Any, Any, None]]
Declare = Callable[[ElasticJob], Any]


def declare_tally(job: ElasticJob) -> Any:
    return job.actors.declare("tally", Tally)


def member(name: str, run: Run, *, until: int, in_step: InStep, declare: Declare = declare_tally) -> Any:
    async def main(source: WorldSource) -> Any:
        parameter = Parameter("w", np.zeros(4, np.float32))
        async with ap.elastic(portions=8, source=source) as job:
            run.jobs[name] = job
            target = declare(job)
            state = job.state([parameter], Optimizer([parameter], SGD()))
            async for step in job.steps(state, until=until):
                async with step:
                    for portion in step.portions:
                        step.add(portion, {"w": np.full(4, portion + 1.0, np.float32)})
                        await asyncio.sleep(0.01)
                    gradients = await step.reduce("mean")
                    await step.update(state_optimizer(state), gradients, learning_rate=0.1)
                    if not step.is_replay:
                        await in_step(name, job, target, step.number)
            return target

    return main


def state_optimizer(state: Any) -> Optimizer:
    return cast(Optimizer, state.optimizers[0])


async def run_members(size: int, run: Run, *, until: int, in_step: InStep, declare: Declare = declare_tally) -> None:
    async with ElasticWorlds(size) as worlds:
        tasks = [
            worlds.start(f"m{n}", member(f"m{n}", run, until=until, in_step=in_step, declare=declare))
            for n in range(size)
        ]
        await asyncio.gather(*tasks)


async def die_once(worlds: ElasticWorlds, run: Run, name: str) -> None:
    """Kill ``name``, the first of the run, where it waits in its step."""
    if not run.killed:
        run.killed.append(name)
        run.before = list(run.answers)
        asyncio.get_running_loop().call_soon(worlds.kill, name)
        await asyncio.sleep(1)


async def count_once(run: Run, tally: Any) -> None:
    """Ask once, and note what comes back; a changed world is the step's business."""
    try:
        run.answers.append(await tally.add(1))
    except (PeerError, StaleGeneration, asyncio.CancelledError) as error:
        run.failures.append(type(error).__name__)
        raise


def test_all_ranks_reach_the_one_actor_of_a_name() -> None:
    run = Run()

    async def in_step(name: str, job: ElasticJob, tally: Any, number: int) -> None:
        await count_once(run, tally)

    run_virtual(run_members(3, run, until=4, in_step=in_step))
    assert sorted(run.answers) == list(range(1, 13))
    assert LIVES == ["start 0", "stop 12"]


def victim_of(run: Run, name: str = "tally") -> str:
    """Return the member where the actor lives."""
    return next(member for member, job in run.jobs.items() if name in job.actors._lives.living)  # noqa: SLF001  # which process has the actor in its memory is shown to nobody


@pytest.mark.parametrize("size", [2, 3, 4])
def test_an_actor_whose_rank_is_killed_goes_on_elsewhere_and_forgets_no_answer(size: int) -> None:
    run = Run()

    async def main() -> None:
        async with ElasticWorlds(size) as worlds:

            async def in_step(name: str, job: ElasticJob, tally: Any, number: int) -> None:
                await count_once(run, tally)
                if number == 3 and name == victim_of(run):
                    await die_once(worlds, run, name)

            names = [f"m{n}" for n in range(size)]
            tasks = {name: worlds.start(name, member(name, run, until=8, in_step=in_step)) for name in names}
            await worlds.formed(2)
            await asyncio.gather(*(task for name, task in tasks.items() if worlds.is_running(name)))

    run_virtual(main())
    assert len(set(run.answers)) == len(run.answers), "no number was given twice"
    assert run.answers == sorted(run.answers)
    started = [int(line.split()[1]) for line in LIVES if line.startswith("start")]
    assert len(started) == 2, LIVES
    assert started[1] >= max(run.before), "it went on from what it had answered"
    assert max(run.answers) <= len(run.answers) + len(run.failures)


def test_a_rank_that_leaves_in_good_order_takes_nothing_with_it() -> None:
    run = Run()

    async def main() -> None:
        async with ElasticWorlds(3) as worlds:

            async def in_step(name: str, job: ElasticJob, tally: Any, number: int) -> None:
                await tally.forget(1)  # saved by nobody but the handing over
                if number == 2 and name == victim_of(run):
                    worlds.drain(name)

            tasks = [worlds.start(f"m{n}", member(f"m{n}", run, until=8, in_step=in_step)) for n in range(3)]
            targets = await asyncio.gather(*tasks)
            assert len(worlds.worlds) == 2
            del targets

    run_virtual(main())
    begun = [line for line in LIVES if line.startswith("start")]
    assert begun[0] == "start 0"
    steps_of_three = int(begun[1].split()[1])
    assert steps_of_three % 3 == 0
    assert steps_of_three >= 9
    assert LIVES[-1] == f"stop {steps_of_three + 2 * (8 - steps_of_three // 3)}", "every message of every step counted"


def test_an_actor_of_a_survivor_keeps_its_object_and_hears_of_the_world() -> None:
    run = Run()
    seen: list[list[int]] = []

    async def main() -> None:
        async with ElasticWorlds(4) as worlds:

            async def in_step(name: str, job: ElasticJob, tally: Any, number: int) -> None:
                await tally.forget(1)
                others = [each for each in run.jobs if each != victim_of(run) and worlds.is_running(each)]
                if number == 3 and name == others[0]:
                    await die_once(worlds, run, name)
                if number == 7:
                    seen.append(await tally.seen())

            tasks = {n: worlds.start(n, member(n, run, until=8, in_step=in_step)) for n in ("m0", "m1", "m2", "m3")}
            await worlds.formed(2)
            await asyncio.gather(*(task for name, task in tasks.items() if worlds.is_running(name)))
            generations = [world.generation for world in worlds.worlds]
            assert seen == [generations] * 3

    run_virtual(main())
    assert [line.split()[0] for line in LIVES] == ["start", "stop"], "neither hook runs between two worlds"


def test_calls_between_actors_and_streams_of_worlds() -> None:
    run = Run()

    def declare(job: ElasticJob) -> Any:
        job.actors.declare("first", Tally)
        return job.actors.declare("second", Tally, 100)

    async def in_step(name: str, job: ElasticJob, second: Any, number: int) -> None:
        run.answers.append(await second.ask_other("first"))

    run_virtual(run_members(2, run, until=3, in_step=in_step, declare=declare))
    assert sorted(run.answers) == [1, 2, 3, 4, 5, 6]


def test_watchers_get_every_world() -> None:
    run = Run()
    seen: list[tuple[list[str], list[str]]] = []

    async def main() -> None:
        async with ElasticWorlds(3) as worlds:

            async def in_step(name: str, job: ElasticJob, tally: Any, number: int) -> None:
                if (name, number) == ("m0", 0):
                    watching.append(asyncio.create_task(watch(job)))
                    await asyncio.sleep(0)
                if (name, number) == ("m2", 3):
                    worlds.drain("m2")
                if (name, number) == ("m0", 5):
                    worlds.start("m3", member("m3", run, until=12, in_step=in_step))

            async def watch(job: ElasticJob) -> None:
                async for change in job.watch_world():
                    joined, left = ([worlds.name_of(each) for each in names] for names in (change.joined, change.left))
                    seen.append((joined, left))

            watching: list[asyncio.Task[None]] = []
            tasks = [worlds.start(f"m{n}", member(f"m{n}", run, until=12, in_step=in_step)) for n in range(3)]
            await asyncio.gather(*tasks)
            await asyncio.gather(*watching)

    run_virtual(main())
    assert seen == [([], ["m2"]), (["m3"], [])]


def test_an_actor_that_fails_starts_again_from_its_snapshot_as_often_as_allowed() -> None:
    run = Run()
    downs: list[str] = []

    def declare(job: ElasticJob) -> Any:
        return job.actors.declare(
            "tally", Tally, intensity=Intensity(restarts=2, period=60), backoff=Backoff(initial=0.01)
        )

    async def in_step(name: str, job: ElasticJob, tally: Any, number: int) -> None:
        if name != "m0":
            return
        if number < 3:
            await tally.add(1)
            await tally.forget(100)
            await tally.fail.tell()
            await asyncio.sleep(0.5)
        else:
            with pytest.raises(ActorDown) as caught:
                await tally.add(1)
            downs.append(str(caught.value))

    run_virtual(run_members(2, run, until=4, in_step=in_step, declare=declare))
    assert [line for line in LIVES if line.startswith("start")] == ["start 0", "start 1", "start 2"]
    assert len(downs) == 1


def test_errors_of_an_endpoint_come_to_its_caller() -> None:
    run = Run()

    async def in_step(name: str, job: ElasticJob, tally: Any, number: int) -> None:
        if number == 0:
            with pytest.raises(RemoteError, match="broken"):
                await tally.fail()
            with pytest.raises(UsageError):
                await tally.add("one", 2, 3)
            with pytest.raises(AttributeError, match="has no endpoint"):
                await tally.subtract(1)

    run_virtual(run_members(2, run, until=1, in_step=in_step))


def test_a_call_that_the_end_of_the_world_ends_says_so_and_the_next_one_goes_to_the_successor() -> None:
    run = Run()
    outcomes: list[str] = []

    async def main() -> None:
        async with ElasticWorlds(3) as worlds:

            async def outside(tally: Any) -> None:
                try:
                    await tally.slow(60.0)
                except WorldChanged as error:
                    outcomes.append(type(error).__name__)
                outcomes.append(str(await tally.add(1)))  # waits for the next world

            async def in_step(name: str, job: ElasticJob, tally: Any, number: int) -> None:
                home = victim_of(run)
                if number == 1 and name == next(each for each in run.jobs if each != home):
                    callers.append(asyncio.create_task(outside(tally)))
                if number == 3 and name == home:
                    await die_once(worlds, run, name)

            callers: list[asyncio.Task[None]] = []
            tasks = {n: worlds.start(n, member(n, run, until=9, in_step=in_step)) for n in ("m0", "m1", "m2")}
            await worlds.formed(2)
            await asyncio.gather(*(task for name, task in tasks.items() if worlds.is_running(name)))
            await asyncio.gather(*callers)

    run_virtual(main())
    assert outcomes == ["WorldChanged", "1"]


class Summing(ElasticActor):
    """A place of a mesh, with collectives among all of them."""

    def __init__(self) -> None:
        self.calls = 0

    def state(self) -> object:
        return self.calls

    def restore(self, state: Any) -> None:
        self.calls = state

    @endpoint
    async def total(self) -> tuple[float, int]:
        self.calls += 1
        await self.save()
        summed = np.ones(3, np.float32)
        await self.group().all_reduce(summed)
        return float(summed[0]), self.calls


def test_a_mesh_knows_its_holes_and_newcomers_fill_them() -> None:
    run = Run()
    answers: dict[int, tuple[dict[int, tuple[float, int]], tuple[int, ...]]] = {}

    def declare(job: ElasticJob) -> Any:
        return job.actors.declare_mesh("sums", Summing, places=3)

    async def main() -> None:
        async with ElasticWorlds(3) as worlds:

            async def in_step(name: str, job: ElasticJob, mesh: ElasticMesh[Summing], number: int) -> None:
                if job.rank == 0:
                    found = await mesh.ask(Summing.total)
                    answers[number] = (dict(found.values), found.holes)
                if (name, number) == ("m2", 2):
                    await die_once(worlds, run, name)
                if (name, number) == ("m0", 5):
                    worlds.start("m3", member("m3", run, until=14, in_step=in_step, declare=declare))

            names = ("m0", "m1", "m2")
            tasks = {n: worlds.start(n, member(n, run, until=14, in_step=in_step, declare=declare)) for n in names}
            await asyncio.gather(tasks["m0"], tasks["m1"])

    run_virtual(main())
    first, holed, last = answers[0], answers[4], answers[13]
    assert first[1] == ()
    assert sorted(first[0]) == [0, 1, 2]
    assert {summed for summed, _ in first[0].values()} == {3.0}
    assert len(holed[1]) == 1
    assert {summed for summed, _ in holed[0].values()} == {2.0}
    assert last[1] == ()
    assert {summed for summed, _ in last[0].values()} == {3.0}
    (hole,) = holed[1]
    calls = [found[0][hole][1] for _, found in sorted(answers.items()) if hole in found[0]]
    assert calls == sorted(set(calls)), "the actor that fills the hole goes on from the snapshot"


def test_references_of_a_world_that_is_over_are_refused() -> None:
    async def main() -> None:
        async with local_world(2) as nodes:
            old = await nodes[0].spawn(Tally)
            with pytest.raises(UsageError, match="declare"):
                Tally().named("x")
        async with local_world(2) as nodes:
            holder = await nodes[0].spawn(Holder)
            with pytest.raises(UsageError, match="world that is over"):
                await nodes[1].ref(holder.name, 0, actor_class=Holder).keep(old)

    run_virtual(main())


class Holder(ap.Actor):
    @endpoint
    async def keep(self, other: Any) -> None:
        del other


def test_a_node_tells_of_the_ranks_that_its_world_loses() -> None:
    async def main() -> None:
        seen: list[WorldChange] = []

        async def watch(node: ap.Node) -> None:
            seen.extend([change async for change in node.watch_world()])

        async with local_world(3) as nodes:
            await asyncio.gather(*(node.world.barrier() for node in nodes))
            watching = asyncio.create_task(watch(nodes[0]))
            await asyncio.sleep(0)
            await nodes[2].stop()
            await asyncio.sleep(0.1)
            lane = nodes[1].links.link(0).lane
            assert lane is not None
            lane.abort(PeerLost("killed", rank=1))
            await asyncio.sleep(0.1)
            await nodes[0].stop()
            await watching
        assert [(change.left, change.is_by_loss) for change in seen] == [
            (("rank 2 on localhost",), False),
            (("rank 1 on localhost",), True),
        ]

    run_virtual(main())


def test_what_cannot_be_declared_is_said() -> None:
    class Sync(ap.Actor):
        pass

    with pytest.raises(UsageError, match="async def"):

        class Wrong(ElasticActor):
            def on_world(self, change: WorldChange) -> None:  # type: ignore[override]
                pass

    with pytest.raises(UsageError, match="expected def"):

        class Other(ElasticActor):
            async def state(self) -> object:
                return None

    job = ap.elastic(portions=4)
    with pytest.raises(UsageError, match="subclass of ElasticActor"):
        job.actors.declare("a", Sync)
    job.actors.declare("a", Tally)
    with pytest.raises(UsageError, match="taken"):
        job.actors.declare("a", Tally)
    with pytest.raises(UsageError, match="places"):
        job.actors.declare_mesh("m", Tally, places=0)
    with pytest.raises(UsageError, match="declared one"):
        job.actors.ref("b")
    with pytest.raises(WorldChanged, match="has not begun"):
        job.actors.ref("a").add.tell(1)


def test_ranks_that_declare_different_actors_are_told() -> None:
    run = Run()

    async def main() -> None:
        async with ElasticWorlds(2) as worlds:

            async def nothing(*_: Any) -> None:
                pass

            def one(job: ElasticJob) -> Any:
                return job.actors.declare("one", Tally)

            def two(job: ElasticJob) -> Any:
                return job.actors.declare("two", Tally)

            tasks = [
                worlds.start("m0", member("m0", run, until=2, in_step=nothing, declare=one)),
                worlds.start("m1", member("m1", run, until=2, in_step=nothing, declare=two)),
            ]
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert any(isinstance(error, OperationMismatch) for error in found), found

    run_virtual(main())


@pytest.mark.parametrize("seed", range(chosen(3, soak=100)))
def test_no_number_is_given_twice_and_none_is_lost_under_random_kills_and_joins(seed: int) -> None:
    dice = random.Random(seed)
    run = Run()

    async def main() -> None:
        async with ElasticWorlds(3) as worlds:

            async def in_step(name: str, job: ElasticJob, tally: Any, number: int) -> None:
                await count_once(run, tally)

            names = [f"m{n}" for n in range(3)]
            for name in names:
                worlds.start(name, member(name, run, until=30, in_step=in_step))
            await worlds.formed(1)
            for number in range(3):
                await asyncio.sleep(dice.uniform(0.05, 0.5))
                running = [name for name in worlds.tasks if worlds.is_running(name)]
                if len(running) > 1:
                    worlds.kill(dice.choice(running))
                    worlds.start(f"n{number}", member(f"n{number}", run, until=30, in_step=in_step))
                await asyncio.sleep(dice.uniform(0.0, 0.3))
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*(task for name, task in worlds.tasks.items() if worlds.is_running(name)))

    run_virtual(main())
    assert len(set(run.answers)) == len(run.answers)
    assert max(run.answers) <= len(run.answers) + len(run.failures)
