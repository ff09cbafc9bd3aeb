"""Actors of elastic jobs at the end of a world: their calls, snapshots and restarts, and the hook on_world."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, cast

import pytest

import asyncpar as ap
from asyncpar.actors.supervision.policy import Backoff, Intensity
from asyncpar.elasticity.elastic_actor import ElasticActor
from asyncpar.elasticity.job import ElasticJob
from asyncpar.errors import ActorDown, UsageError, WorldChanged
from asyncpar.hosts.messages import WorldChange
from asyncpar.testing import run_virtual
from asyncpar.testing.elastic_worlds import ElasticWorlds
from tests.elasticity.test_actors import Run, count_once, die_once, member, victim_of


class Slow(ElasticActor):
    """Takes its time, and notes what it does."""

    def __init__(self) -> None:
        self.log: list[str] = []

    async def on_world(self, change: WorldChange) -> None:
        self.log.append(f"world {change.generation} begins")
        await asyncio.sleep(0.05)
        self.log.append(f"world {change.generation}")

    @ap.endpoint
    async def work(self, seconds: float, name: str) -> str:
        self.log.append(name)
        await asyncio.sleep(seconds)
        return name

    @ap.endpoint
    async def read(self) -> list[str]:
        return self.log

    @ap.endpoint
    async def fail(self) -> None:
        raise RuntimeError("broken")


class Counted(ElasticActor):
    """Never saves by itself."""

    def __init__(self) -> None:
        self.count = 0

    def state(self) -> object:
        return self.count

    def restore(self, state: Any) -> None:
        self.count = state

    @ap.endpoint
    async def add(self, n: int) -> int:
        self.count += n
        return self.count


async def run_to_the_end(worlds: ElasticWorlds, names: list[str], **kwargs: Any) -> None:
    tasks = {name: worlds.start(name, member(name, **kwargs)) for name in names}
    await worlds.formed(2)
    await asyncio.gather(*(task for name, task in tasks.items() if worlds.is_running(name)))


def test_calls_that_wait_in_the_mailbox_of_a_survivor_fail_at_once_and_what_runs_may_end() -> None:
    run = Run()
    ends: dict[str, tuple[str, float]] = {}
    killed_at: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with ElasticWorlds(3) as worlds:

            async def call(slow: Any, name: str) -> None:
                try:
                    answer = await slow.work(0.7, name)
                except WorldChanged as error:
                    answer = type(error).__name__
                ends[name] = (answer, loop.time())

            async def in_step(name: str, job: ElasticJob, slow: Any, number: int) -> None:
                home = victim_of(run, "slow")
                if number == 2 and name == home and not callers:  # the step comes again
                    callers.extend(asyncio.create_task(call(slow, each)) for each in ("first", "second", "third"))
                    await asyncio.sleep(0.4)  # the first has 0.3 s to go when the world ends
                if number == 2 and name == next(each for each in run.jobs if each != home):
                    await asyncio.sleep(0.3)
                    killed_at.append(loop.time())
                    await die_once(worlds, run, name)
                if number == 8 and name == home:
                    logs.append(await slow.read())

            callers: list[asyncio.Task[None]] = []
            logs: list[list[str]] = []

            def declare(job: ElasticJob) -> Any:
                return job.actors.declare("slow", Slow)

            names = ["m0", "m1", "m2"]
            await run_to_the_end(worlds, names, run=run, until=9, in_step=in_step, declare=declare)
            await asyncio.gather(*callers)
            (log,) = logs
            assert "second" not in log, "what waited was not begun"
            assert "third" not in log

    run_virtual(main())
    assert ends["first"][0] == "first"
    for name in ("second", "third"):
        answer, when = ends[name]
        assert answer == "WorldChanged"
        assert when - killed_at[0] < 0.2
        assert when < ends["first"][1]


def test_a_call_to_an_actor_whose_rank_has_left_the_world_already_says_that_the_world_is_over() -> None:
    """It is no ``ActorDown``: the actor lives on, and a step swallows only the end of a world."""
    run = Run()
    outcomes: list[str] = []

    async def main() -> None:
        async with ElasticWorlds(2) as worlds:

            async def call(slow: Any) -> None:
                while len(worlds.worlds) < 2:
                    try:
                        await slow.work(0.0, "now")
                    except (WorldChanged, ActorDown) as error:
                        outcomes.append(type(error).__name__)
                    await asyncio.sleep(0.001)

            async def in_step(name: str, job: ElasticJob, slow: Any, number: int) -> None:
                if number == 1 and name == "m0":
                    callers.append(asyncio.create_task(call(slow)))
                if number == 2 and name == "m0":
                    worlds.start("m2", member("m2", **settings))
                await asyncio.sleep(0.01)

            def declare(job: ElasticJob) -> Any:
                return job.actors.declare("slow", Slow)

            settings: dict[str, Any] = {"run": run, "until": 20, "in_step": in_step, "declare": declare}
            callers: list[asyncio.Task[None]] = []
            await run_to_the_end(worlds, ["m0", "m1"], **settings)
            await asyncio.gather(*callers)

    run_virtual(main())
    assert set(outcomes) <= {"WorldChanged"}


@pytest.mark.parametrize(("mirrors", "survives"), [(1, False), (2, True)])
def test_the_loss_of_an_actors_rank_and_its_mirror_at_once(mirrors: int, survives: bool) -> None:
    run = Run()
    started: list[int] = []

    class Kept(Counted):
        async def on_start(self) -> None:
            started.append(self.count)

        @ap.endpoint
        async def add(self, n: int) -> int:
            self.count += n
            await self.save()
            return self.count

    def declare(job: ElasticJob) -> Any:
        return job.actors.declare("kept", Kept, mirrors=mirrors)

    async def main() -> None:
        async with ElasticWorlds(4) as worlds:

            async def in_step(name: str, job: ElasticJob, kept: Any, number: int) -> None:
                if number < 3:
                    await count_once(run, kept)
                if number == 3 and not run.killed and name == victim_of(run, "kept"):  # the step comes again
                    members = list(worlds.worlds[-1].members)
                    mirror = members[job.actors.placements["kept"].mirrors[0]]
                    asyncio.get_running_loop().call_soon(worlds.kill, mirror)
                    await die_once(worlds, run, name)

            names = [f"m{n}" for n in range(4)]
            await run_to_the_end(worlds, names, run=run, until=8, in_step=in_step, declare=declare)

    run_virtual(main())
    assert started[0] == 0
    assert started[-1] == (12 if survives else 0)


@pytest.mark.parametrize("every", [1, 5])
def test_an_actor_saves_after_every_few_messages(every: int) -> None:
    run = Run()
    started: list[int] = []

    class Noted(Counted):
        async def on_start(self) -> None:
            started.append(self.count)

    def declare(job: ElasticJob) -> Any:
        return job.actors.declare("counted", Noted, save_every=every)

    async def main() -> None:
        async with ElasticWorlds(3) as worlds:

            async def in_step(name: str, job: ElasticJob, counted: Any, number: int) -> None:
                await count_once(run, counted)
                if number == 3 and name == victim_of(run, "counted"):
                    await die_once(worlds, run, name)

            await run_to_the_end(worlds, ["m0", "m1", "m2"], run=run, until=8, in_step=in_step, declare=declare)

    run_virtual(main())
    assert started[0] == 0
    assert max(run.before) - every < started[1] <= max(run.before) + len(run.failures)
    if every == 1:
        assert len(set(run.answers)) == len(run.answers), "no number was given twice"


def test_what_an_actor_has_failed_counts_in_the_worlds_that_follow() -> None:
    run = Run()
    outcomes: dict[int, str] = {}
    starts: list[str] = []

    class Failing(Slow):
        async def on_start(self) -> None:
            starts.append("start")

    def declare(job: ElasticJob) -> Any:
        intensity = Intensity(restarts=2, period=1000)
        return job.actors.declare("slow", Failing, intensity=intensity, backoff=Backoff(initial=0.01))

    async def main() -> None:
        async with ElasticWorlds(4) as worlds:

            async def in_step(name: str, job: ElasticJob, slow: Any, number: int) -> None:
                if name == "m0" and number in (1, 2, 8, 10, 18):
                    try:
                        await slow.work(0.0, "alive")
                        outcomes[number] = "alive"
                        if number != 18:
                            slow.fail.tell()
                            await asyncio.sleep(0.2)
                    except ActorDown as error:
                        outcomes[number] = str(error)
                if name == "m0" and number in (4, 14):
                    others = [each for each in ("m1", "m2", "m3") if worlds.is_running(each)]
                    home = victim_of(run, "slow") if number == 4 else ""
                    worlds.drain(home if home in others else others[0])

            await run_to_the_end(
                worlds, [f"m{n}" for n in range(4)], run=run, until=20, in_step=in_step, declare=declare
            )
            assert len(worlds.worlds) == 3

    run_virtual(main())
    assert [outcomes[number] for number in (1, 2, 8)] == ["alive"] * 3
    assert "slow" in outcomes[10], "the third failure was one too many"
    assert "failed too often" in outcomes[18], "and a new world does not change that"
    assert len(starts) in (3, 4)


async def flood(slow: Any, name: str) -> None:
    """Ask again and again, whatever becomes of the world."""
    for number in range(10_000):
        with contextlib.suppress(WorldChanged):
            await slow.work(0.0, f"{name} {number}")
        await asyncio.sleep(0.001)


def test_an_actor_hears_of_a_world_before_its_first_message() -> None:
    run = Run()
    logs: list[list[str]] = []

    async def main() -> None:
        async with ElasticWorlds(4) as worlds:

            async def in_step(name: str, job: ElasticJob, slow: Any, number: int) -> None:
                home = victim_of(run, "slow")
                if number == 1:
                    callers.append(asyncio.create_task(flood(slow, name)))
                if number == 3 and not run.killed and name == next(each for each in run.jobs if each != home):
                    callers.pop().cancel()
                    await die_once(worlds, run, name)
                if number == 7 and name == home:
                    logs.append(await slow.read())

            def declare(job: ElasticJob) -> Any:
                return job.actors.declare("slow", Slow)

            callers: list[asyncio.Task[None]] = []
            names = [f"m{n}" for n in range(4)]
            await run_to_the_end(worlds, names, run=run, until=8, in_step=in_step, declare=declare)
            for caller in callers:
                caller.cancel()
            await asyncio.wait(callers)

    run_virtual(main())
    (log,) = logs
    assert log[:2] == ["world 0 begins", "world 0"]
    begins = [index for index, line in enumerate(log) if line.endswith("begins")]
    assert len(begins) == 2
    for index in begins:
        assert log[index + 1] == log[index].removesuffix(" begins"), "nothing came in between"


def test_watchers_of_worlds_hear_what_happens_before_their_first_step() -> None:
    run = Run()
    seen: list[list[str]] = []

    async def main() -> None:
        async with ElasticWorlds(3) as worlds:

            async def in_step(name: str, job: ElasticJob, slow: Any, number: int) -> None:
                if (name, number) == ("m0", 0):
                    watches.append(job.watch_world())
                if (name, number) == ("m2", 2):
                    worlds.drain("m2")

            watches: list[Any] = []
            await run_to_the_end(
                worlds,
                ["m0", "m1", "m2"],
                run=run,
                until=6,
                in_step=in_step,
                declare=lambda job: job.actors.declare("slow", Slow),
            )
            seen.extend([[*map(worlds.name_of, change.left)] async for change in cast(Any, watches[0])])

    run_virtual(main())
    assert seen == [["m2"]]


def test_wrong_numbers_are_refused() -> None:
    job = ap.elastic(portions=4)
    with pytest.raises(UsageError, match="mirrors"):
        job.actors.declare("a", Slow, mirrors=-1)
    with pytest.raises(UsageError, match="save_every"):
        job.actors.declare("a", Slow, save_every=0)
    with pytest.raises(UsageError, match="mirrors"):
        job.actors.declare_mesh("m", Slow, places=2, mirrors=-1)
