"""Steps and rounds of elastic jobs are in the event ring, with the rank's own time: a slow rank is named."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.collectives.communicator import Communicator, recorder_of
from asyncpar.collectives.ledger import world_number
from asyncpar.core.observe.recorder import Recorder
from asyncpar.core.observe.records import EventKind, EventState
from asyncpar.elasticity.step import ElasticStep
from asyncpar.elasticity.worlds import WorldSource
from asyncpar.nn.linear import Linear
from asyncpar.nn.optimizers import Adam, Optimizer
from asyncpar.nn.parameter import Initializer
from asyncpar.observe.image import Event, read_image
from asyncpar.observe.rounds import Cause, Round, rounds_of
from asyncpar.observe.stragglers import REPORTED_ROUNDS, Straggler, find_straggler
from asyncpar.parallel.local.outer import OuterConfig
from asyncpar.testing import run_virtual
from asyncpar.testing.elastic_worlds import ElasticWorlds
from tests.elasticity.pipeline_training import squares
from tests.elasticity.training import Model

STEPS = REPORTED_ROUNDS + 2
PORTIONS = 4
CULPRIT = "m1"
SHORT, LONG = 0.03, 0.05


def steps_of(recorder: Recorder) -> list[Event]:
    return [event for event in read_image(recorder.snapshot()).events if event.kind is EventKind.STEP]


class Rings:
    """What the members of a run have recorded in their last world, by name."""

    def __init__(self) -> None:
        self.ranks: dict[str, int] = {}
        self.steps: dict[str, list[Event]] = {}
        self.rounds: dict[str, list[Round]] = {}

    def look(self, name: str, world: Communicator, generation: int) -> None:
        recorder = recorder_of(world)
        self.ranks[name], self.steps[name] = world.rank, steps_of(recorder)
        self.rounds[name] = rounds_of(read_image(recorder.snapshot()).events, world_number(generation), REPORTED_ROUNDS)

    def straggler(self) -> Straggler | None:
        return find_straggler({rank: self.rounds[name] for name, rank in self.ranks.items()})


Main = Callable[[WorldSource, str, Rings], Awaitable[None]]


async def run(size: int, main: Main) -> Rings:
    """Run ``main`` in a world of ``size``, and return what was recorded."""
    rings = Rings()
    async with ElasticWorlds(size) as worlds:

        def member(name: str) -> asyncio.Task[Any]:
            async def run_member(source: WorldSource) -> None:
                await main(source, name, rings)

            return worlds.start(name, run_member)

        await asyncio.gather(*(member(f"m{number}") for number in range(size)))
    return rings


async def one_step(step: ElasticStep, model: Model, seconds: float, *, is_gathered: bool = False) -> None:
    """Do a step in which each portion takes so long."""
    if is_gathered and not step.is_replay:
        await step.gather()
    for portion in step.portions:
        gradients, loss = model.backward(step.rng(portion))
        await asyncio.sleep(seconds)
        step.add(portion, gradients, loss=loss)
    await step.update(model.optimizer, await step.reduce("mean"), learning_rate=0.01)


def check_culprit(rings: Rings, excess: float) -> None:
    straggler = rings.straggler()
    assert straggler is not None
    assert (straggler.rank, straggler.cause) == (rings.ranks[CULPRIT], Cause.COMPUTE)
    assert straggler.excess == pytest.approx(excess, abs=0.1 * excess)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_rank_that_computes_longer_in_its_steps_is_named(zero: int) -> None:
    async def main(source: WorldSource, name: str, rings: Rings) -> None:
        model = Model()
        async with ap.elastic(portions=PORTIONS, source=source) as job:
            state = job.state(model.parameters, model.optimizer, zero=zero)
            async for step in job.steps(state, until=STEPS):
                async with step:
                    await one_step(step, model, LONG if name == CULPRIT else SHORT, is_gathered=zero == 3)
            rings.look(name, job.world, job.generation)

    rings = run_virtual(run(4, main))
    check_culprit(rings, LONG - SHORT)
    for steps in rings.steps.values():
        assert [(step.sequence, step.state) for step in steps] == [(n, EventState.COMPLETED) for n in range(STEPS)]
    assert rings.steps["m0"][3].label == "step 3 of training"


def test_ranks_that_wait_for_others_in_and_between_steps_have_no_more_time_of_their_own() -> None:
    async def main(source: WorldSource, name: str, rings: Rings) -> None:
        model = Model()
        async with ap.elastic(portions=2, source=source) as job:
            state = job.state(model.parameters, model.optimizer)
            async for step in job.steps(state, until=STEPS):
                async with step:
                    await one_step(step, model, SHORT)
                await asyncio.sleep(0.02 if name == CULPRIT else 0.0)
                await step.world.all_reduce(np.ones(4), "max")
            rings.look(name, job.world, job.generation)

    rings = run_virtual(run(2, main))
    assert [one.own for one in rings.rounds["m0"]] == pytest.approx([SHORT] * REPORTED_ROUNDS, abs=1e-3)
    assert [one.own for one in rings.rounds[CULPRIT]] == pytest.approx([SHORT + 0.02] * REPORTED_ROUNDS, abs=1e-3)


def test_a_step_that_a_lost_rank_ends_comes_again_under_its_number() -> None:
    lost_in = 3
    ended: list[Event] = []
    rings = Rings()

    async def main() -> None:
        async with ElasticWorlds(3) as worlds:

            def member(name: str) -> asyncio.Task[Any]:
                async def run_member(source: WorldSource) -> None:
                    model = Model()
                    async with ap.elastic(portions=PORTIONS, source=source) as job:
                        state = job.state(model.parameters, model.optimizer)
                        async for step in job.steps(state, until=6):
                            recorder = recorder_of(job.world)
                            async with step:
                                if (name, step.number, job.size) == ("m2", lost_in, 3):
                                    await asyncio.sleep(0.005)  # the others are in the step, too
                                    worlds.kill("m2")
                                    await asyncio.sleep(1.0)
                                await one_step(step, model, 0.01)
                            if step.change is not None:
                                ended.append(steps_of(recorder)[-1])
                        rings.look(name, job.world, job.generation)

                return worlds.start(name, run_member)

            tasks = [member(f"m{number}") for number in range(3)]
            await asyncio.gather(*tasks[:2])

    run_virtual(main())
    assert [(event.sequence, event.state) for event in ended] == [(lost_in, EventState.CANCELLED)] * 2
    for steps in rings.steps.values():
        assert [(step.sequence, step.state) for step in steps] == [(n, EventState.COMPLETED) for n in range(lost_in, 6)]


@pytest.mark.parametrize("quorum", [1.0, 0.5])
def test_a_rank_whose_workers_take_longer_in_rounds_is_named(quorum: float) -> None:
    inner = 2

    async def main(source: WorldSource, name: str, rings: Rings) -> None:
        model = Model()
        async with ap.elastic(portions=PORTIONS, source=source) as job:
            state = job.state(model.parameters, model.optimizer, outer=OuterConfig())
            async for current in job.rounds(state, steps=inner, quorum=quorum, grace=1.0, until=STEPS):
                async with current:
                    for portion in current.portions:
                        with current.worker(portion) as worker:
                            for step in range(current.steps):
                                gradients, _ = model.backward(current.rng(portion, step))
                                for parameter in model.parameters:
                                    parameter.grad = gradients[parameter.name]
                                worker.optimizer.step(0.003)
                                await asyncio.sleep(LONG if name == CULPRIT else SHORT)
            rings.look(name, job.world, job.generation)

    rings = run_virtual(run(4, main))
    check_culprit(rings, inner * (LONG - SHORT))
    for steps in rings.steps.values():
        assert [(step.sequence, step.state) for step in steps] == [(n, EventState.COMPLETED) for n in range(STEPS)]


class SlowLinear(Linear):
    """A layer that takes so long."""

    seconds = 0.0

    def forward(self, x: Any) -> Any:
        time.sleep(self.seconds)
        return super().forward(x)


async def test_the_own_time_of_a_rank_in_a_pipeline_is_that_in_which_it_computes() -> None:
    steps, seconds = 4, 0.02

    async def main(source: WorldSource, name: str, rings: Rings) -> None:
        init = Initializer.from_seed(3)
        model = [SlowLinear("in", 6, 16, initializer=init), SlowLinear("out", 16, 4, initializer=init)]
        for stage in model:
            stage.seconds = seconds if name == CULPRIT else 0.0
        parameters = [parameter for stage in model for parameter in stage.parameters()]
        optimizer = Optimizer(parameters, Adam())
        async with ap.elastic(portions=PORTIONS, source=source) as job:
            state = job.state(parameters, optimizer, pipeline=model)
            async for step in job.steps(state, until=steps):
                async with step:

                    def sample(portion: int, number: int = step.number) -> Any:
                        return np.random.default_rng([number, portion]).standard_normal((5, 6)).astype(np.float32)

                    gradients = await step.run_pipeline(sample, lambda p: sample(p)[:, :4], squares, op="mean")
                    await step.update(optimizer, gradients, learning_rate=0.01)
            rings.look(name, job.world, job.generation)

    rings = await run(2, main)
    assert min(step.own for step in rings.steps[CULPRIT]) >= PORTIONS * seconds
    assert all(step.state is EventState.COMPLETED for step in rings.steps["m0"])
    assert len(rings.steps["m0"]) == len(rings.steps[CULPRIT]) == steps
    fastest = min(step.own for step in rings.steps["m0"])
    assert fastest < PORTIONS * seconds, "what it waits for is not its own"
