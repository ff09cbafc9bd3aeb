"""The end of a world inside groups of errors: every place that knows the bare error knows it there, at any depth."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest

import asyncpar as ap
from asyncpar.elasticity.elastic_actor import ElasticActor
from asyncpar.elasticity.interruption import is_world_changed, program_errors
from asyncpar.elasticity.job import ElasticJob
from asyncpar.elasticity.step import ElasticStep
from asyncpar.elasticity.worlds import WorldSource
from asyncpar.errors import AsyncparError, PeerLost, WorldChanged
from asyncpar.hosts.messages import WorldChange
from asyncpar.nn.optimizers import SGD, Optimizer
from asyncpar.nn.parameter import Parameter
from asyncpar.parallel.local.outer import OuterConfig
from asyncpar.testing import run_virtual
from asyncpar.testing.elastic_worlds import ElasticWorlds
from tests.elasticity.pipeline_training import train_pipeline
from tests.products import in_turn

Work = Callable[[], Awaitable[Any]]
Form = Callable[[Work], Awaitable[Any]]

UNTIL = 5
FAULT = 2
"""The step in which a rank is lost."""
NAMES = ("m0", "m1", "m2")


# -- forms of errors ---------------------------------------------------------------------------------------------------


async def bare(work: Work) -> Any:
    return await work()


async def gathered(work: Work) -> Any:
    return (await asyncio.gather(work(), asyncio.sleep(0)))[0]


async def in_task_group(work: Work) -> Any:
    async with asyncio.TaskGroup() as tasks:
        result = tasks.create_task(_awaited(work))
        tasks.create_task(asyncio.sleep(20))
        await result
        raise _Done(result.result())


async def in_nested_groups(work: Work) -> Any:
    return await in_task_group(lambda: in_task_group(work))


async def in_anyio_groups(work: Work) -> Any:
    results: list[Any] = []

    async def note() -> None:
        results.append(await work())

    async with anyio.create_task_group() as outer:
        async with anyio.create_task_group() as inner:
            inner.start_soon(note)
        outer.start_soon(anyio.sleep, 0)
    return results[0]


async def twice_by_hand(work: Work) -> Any:
    try:
        return await work()
    except AsyncparError as error:
        raise ExceptionGroup("outer", [error, ExceptionGroup("inner", [error, error])]) from None


async def with_a_cancellation(work: Work) -> Any:
    """An interrupted block may have collected its own cancellation, as ``gather(return_exceptions=True)`` gives it."""
    try:
        return await work()
    except (AsyncparError, asyncio.CancelledError) as error:
        raise BaseExceptionGroup("collected", [error]) from None


FORMS: dict[str, Form] = {
    "bare": bare,
    "gather": gathered,
    "TaskGroup": lambda work: _value(in_task_group, work),
    "nested TaskGroup": lambda work: _value(in_nested_groups, work),
    "anyio": in_anyio_groups,
    "by hand": twice_by_hand,
    "a cancellation": with_a_cancellation,
}


class _Done(Exception):
    """Ends the other tasks of a group whose work has succeeded."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


async def _awaited(work: Work) -> Any:
    return await work()


async def _value(form: Form, work: Work) -> Any:
    """Return what ``work`` returns in a group, whose other task is cancelled then."""
    try:
        return await form(work)
    except BaseExceptionGroup as group:
        found = list(leaves(group))
        if all(isinstance(each, _Done) for each in found):
            return found[0].value  # type: ignore[attr-defined]
        raise


def leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from leaves(each)
    else:
        yield error


async def beside_an_error(work: Work) -> Any:
    """A task of the program fails while the group is ended by the world."""

    async def clean_up() -> None:
        try:
            await asyncio.sleep(20)
        finally:
            raise ValueError("of the program")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(clean_up())
        tasks.create_task(_awaited(lambda: twice_by_hand(work)))


# -- the surfaces ------------------------------------------------------------------------------------------------------


NOTICE = 0.1
"""Seconds after which the loss of a rank is reported, when its links are down: survivors meet an error before, and are
not interrupted."""


@dataclass
class Met:
    """What a run has met."""

    form: Form
    kinds: list[str] = field(default_factory=list)
    """The errors that came out of the form, as the program saw them."""
    starts: list[str] = field(default_factory=list)
    worlds: list[int] = field(default_factory=list)

    async def run(self, work: Work) -> Any:
        try:
            return await self.form(work)
        except BaseException as error:
            self.kinds.append(type(error).__name__)
            raise


class Worker(ElasticActor):
    """Holds its callers, or has another one hold it."""

    def __init__(self, met: Met, surface: str) -> None:
        self.met = met
        self.surface = surface
        self.relayed = 0

    async def on_start(self) -> None:
        self.met.starts.append(self._require_home().name)

    async def on_world(self, change: WorldChange) -> None:
        self.met.worlds.append(change.generation)
        if self.surface == "on_world" and change.generation == 0 and self._require_home().name != "w[0]":
            await self.met.run(lambda: self.named("w[0]").hold(20.0))

    @ap.endpoint
    async def hold(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "held"

    @ap.endpoint
    async def relay(self) -> str:
        self.relayed += 1
        result: str = await self.met.run(lambda: self.named("w[0]").hold(20.0))
        return result

    @ap.endpoint
    async def count(self) -> int:
        return self.relayed


async def in_fault(surface: str, job: ElasticJob, step: ElasticStep, met: Met) -> None:
    """Meet the end of the world on ``surface``."""
    mine = next(each for each, place in job.actors.placements.items() if place.rank == job.rank)
    match surface:
        case "world":
            await met.run(lambda: step.world.barrier(key="a fault"))
        case "ask":
            await met.run(lambda: job.actors.ref("w[0]").hold(20.0))
        case "endpoint":
            await job.actors.ref(mine).relay()
        case "told endpoint":
            job.actors.ref(mine).relay.tell()
            await asyncio.sleep(20)
        case _:
            await asyncio.sleep(20)


def program(surface: str, met: Met, worlds: ElasticWorlds) -> Callable[[str], Any]:
    def member(name: str) -> Callable[[WorldSource], Any]:
        async def main(source: WorldSource) -> bytes:
            parameter = Parameter("w", np.zeros(4, np.float32))
            optimizer = Optimizer([parameter], SGD())
            async with ap.elastic(portions=8, source=source) as job:
                job.actors.declare_mesh("w", Worker, met, surface, places=3)
                state = job.state([parameter], optimizer)
                async for step in job.steps(state, until=UNTIL):
                    async with step:
                        for portion in step.portions:
                            step.add(portion, {"w": np.full(4, portion + step.number, np.float32)})
                        if step.number == FAULT and step.generation == 0:
                            if job.actors.placements["w[0]"].rank == job.rank:
                                await asyncio.sleep(0.3)
                                asyncio.get_running_loop().call_soon(worlds.kill, name)
                                await asyncio.sleep(20)
                            elif surface != "reduce":
                                await in_fault(surface, job, step, met)
                        gradients = await met.run(partial(step.reduce, "mean"))
                        await step.update(optimizer, gradients, learning_rate=0.1)
                if surface == "told endpoint" and job.rank == 0:
                    assert await job.actors.ref("w[1]").count() in (0, 1)
            return parameter.value.tobytes()

        return main

    return member


async def run_members(worlds: ElasticWorlds, member: Callable[[str], Any]) -> list[Any]:
    """Run three members, of which one is lost, and return what came of the others."""
    tasks = {name: worlds.start(name, member(name)) for name in NAMES}
    await asyncio.wait(tasks.values())
    return [task.exception() or task.result() for task in tasks.values() if not task.cancelled()]


SURFACES = ("reduce", "world", "ask", "endpoint", "told endpoint", "on_world")


@pytest.mark.parametrize(("is_late", "form", "surface"), in_turn([True, False], FORMS, SURFACES))
def test_the_end_of_a_world_is_no_failure_of_the_program(surface: str, form: str, *, is_late: bool) -> None:
    met = Met(FORMS[form])

    async def main() -> tuple[list[Any], int]:
        async with ElasticWorlds(3, notice=NOTICE if is_late else 0.0) as worlds:
            results = await run_members(worlds, program(surface, met, worlds))
            return results, len(worlds.worlds)

    results, count = run_virtual(main())
    mean = sum(range(8)) / 8
    wanted = np.zeros(4, np.float32)
    for step in range(UNTIL):
        wanted -= np.float32(0.1) * np.float32(mean + step)
    assert len(results) == 2
    for result in results:
        assert isinstance(result, bytes), repr(result)
        np.testing.assert_allclose(np.frombuffer(result, np.float32), wanted, rtol=1e-5)
    assert count == 2
    assert sorted(met.starts) == ["w[0]", "w[0]", "w[1]", "w[2]"] or sorted(met.starts) == ["w[0]", "w[1]", "w[2]"]
    if is_late:
        is_group = form not in ("bare", "gather")
        assert any(("Group" in kind) is is_group for kind in met.kinds), met.kinds


@pytest.mark.parametrize("surface", SURFACES)
def test_what_the_program_raises_beside_the_end_of_a_world_is_raised_alone(surface: str) -> None:
    met = Met(beside_an_error)

    async def main() -> list[Any]:
        async with ElasticWorlds(3, notice=NOTICE) as worlds:
            return await run_members(worlds, program(surface, met, worlds))

    results = run_virtual(main())
    if surface in ("told endpoint", "on_world"):  # the actor fails, and starts again; the job goes on
        return
    failed = [each for each in results if isinstance(each, BaseException)]
    assert failed
    for error in failed:
        if surface == "endpoint":
            assert "ValueError: of the program" in "".join(traceback.format_exception(error))
            continue
        assert isinstance(error, ExceptionGroup)
        assert [str(each) for each in leaves(error)] == ["of the program"]
        text = "".join(traceback.format_exception(error))
        assert "in clean_up" in text, "its traceback is kept"
        assert "WorldChanged" not in text


@pytest.mark.parametrize("form", FORMS)
def test_a_round_comes_again_whose_block_has_met_the_end_of_the_world(form: str) -> None:
    met = Met(FORMS[form])

    def program_of_rounds(worlds: ElasticWorlds | None) -> Callable[[str], Any]:
        def member(name: str) -> Callable[[WorldSource | None], Any]:
            async def main(source: WorldSource | None) -> bytes:
                parameter = Parameter("w", np.zeros(4, np.float32))
                optimizer = Optimizer([parameter], SGD())
                async with ap.elastic(portions=8, seed=3, source=source) as job:
                    job.actors.declare_mesh("w", Worker, met, "rounds", places=3)
                    state = job.state([parameter], optimizer, outer=OuterConfig())
                    async for current in job.rounds(state, steps=2, until=3):
                        async with current:
                            for portion in current.portions:
                                if worlds is not None and current.number == 1 and job.generation == 0:
                                    if job.actors.placements["w[0]"].rank == job.rank:
                                        await asyncio.sleep(0.3)
                                        asyncio.get_running_loop().call_soon(worlds.kill, name)
                                        await asyncio.sleep(20)
                                    await met.run(lambda: job.actors.ref("w[0]").hold(20.0))
                                with current.worker(portion) as worker:
                                    for step in range(current.steps):
                                        parameter.grad = current.rng(portion, step).random(4).astype(np.float32)
                                        worker.optimizer.step(0.1)
                                        await asyncio.sleep(0.01)
                return parameter.value.tobytes()

            return main

        return member

    async def main() -> list[Any]:
        async with ElasticWorlds(3, notice=NOTICE) as worlds:
            return await run_members(worlds, program_of_rounds(worlds))

    results = run_virtual(main())
    wanted = run_virtual(program_of_rounds(None)("alone")(None))
    assert results == [wanted, wanted]
    assert met.kinds


def test_the_end_of_a_world_in_a_group_of_a_pipelines_stage_is_no_failure_of_the_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raised: list[str] = []

    def loss(output: Any, target: Any) -> tuple[float, Any]:
        if not raised:
            raised.append("once")
            lost = PeerLost("rank 7 is gone", rank=7, cause="gone")
            raise ExceptionGroup("of the loss", [ExceptionGroup("inner", [lost])])
        error = output - target
        return float((error.astype(np.float64) ** 2).sum()), 2 * error

    wanted = run_virtual(train_pipeline(None, until=4))
    monkeypatch.setattr("tests.elasticity.pipeline_training.squares", loss)

    async def main() -> list[Any]:
        async with ElasticWorlds(3) as worlds:
            tasks = [
                worlds.start(name, lambda source, name=name: train_pipeline(source, name, until=4))  # type: ignore[misc]
                for name in NAMES
            ]
            return await asyncio.gather(*tasks)

    for result in run_virtual(main()):
        assert result.parameters == wanted.parameters
    assert raised


def test_groups_are_taken_apart_at_any_depth_and_keep_what_they_are() -> None:
    changed, own = WorldChanged("over", generation=1), ValueError("mine")
    cancelled = asyncio.CancelledError()

    def group(*errors: BaseException) -> BaseExceptionGroup[BaseException]:
        return BaseExceptionGroup("group", errors)

    def left(error: BaseException, *, is_interrupted: bool = False) -> list[BaseException] | None:
        found = program_errors(error, is_world_changed, is_interrupted=is_interrupted)
        return None if found is None else list(leaves(found))

    assert left(changed) is None
    assert left(group(changed, group(group(changed)))) is None
    assert left(group(changed, group(own, group(changed)))) == [own]
    assert program_errors(own, is_world_changed) is own
    whole = group(own, group(own))
    assert program_errors(whole, is_world_changed) is whole
    assert left(cancelled) == [cancelled]
    assert left(group(changed, cancelled)) == [cancelled], "a cancellation is never swallowed"
    assert left(group(changed, cancelled), is_interrupted=True) is None
    assert left(group(changed, own, cancelled), is_interrupted=True) == [own]
