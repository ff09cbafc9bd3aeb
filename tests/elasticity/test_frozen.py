"""Frozen parameters are part of an elastic state: they stay so through losses and joins, to the bits of one rank."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.elasticity.samples import portion_rng
from asyncpar.elasticity.step import ElasticStep
from asyncpar.elasticity.worlds import WorldSource
from asyncpar.errors import AsyncparError
from asyncpar.nn.half import HalfInitializer
from asyncpar.nn.optimizers import Adam, Optimizer
from asyncpar.nn.parameter import Parameter
from asyncpar.parallel.local.outer import OuterConfig
from asyncpar.testing import run_virtual
from asyncpar.testing.elastic_worlds import ElasticWorlds
from tests.elasticity.pipeline_training import make_stages, squares
from tests.elasticity.training import PORTIONS, Model
from tests.products import in_turn

SEED = 11
RATE = 0.01
UNTIL = 8
TURNS: dict[int, tuple[str, ...]] = {1: ("first",), 3: ("first", "second"), 4: (), 5: ("second",), 7: ()}
"""Before which steps the program sets what is frozen: a newcomer that comes later has it from the state alone."""
CUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3},
    "int8": {"codec": "int8"},
    "int8, zero3": {"codec": "int8", "zero": 3},
}

OnStep = Callable[[str, ElasticStep], None]


@dataclass
class Result:
    """What a member comes to."""

    values: bytes
    digest: bytes
    skipped: dict[str, int]


def freeze(parameters: Sequence[Parameter], number: int) -> None:
    """Set what is frozen from this step on, if anything changes."""
    if number in TURNS:
        for parameter in parameters:
            parameter.requires_grad = parameter.name not in TURNS[number]


class HalfModel(Model):
    """The same, stored in bfloat16."""

    def __init__(self) -> None:
        init = HalfInitializer.from_seed(3)
        self.first = init.normal("first", (8, 17), std=0.3)
        self.second = init.normal("second", (17, 4), std=0.3)
        self.optimizer = Optimizer(self.parameters, Adam())


async def train(
    source: WorldSource | None = None,
    *,
    make: Callable[[], Model] = Model,
    on_step: OnStep = lambda _where, _step: None,
    leaves_out: bool = False,
    until: int = UNTIL,
    **cut: Any,
) -> Result:
    """Train until so many steps are committed; frozen gradients are noise, or left out of what ``update`` gets."""
    model, values = make(), b""
    is_sharded = cut.get("zero", 0) == 3
    async with ap.elastic(portions=PORTIONS, seed=SEED, source=source) as job:
        state = job.state(model.parameters, model.optimizer, **cut)
        async for step in job.steps(state, until=until):
            async with step:
                freeze(model.parameters, step.number)
                on_step("frozen", step)
                if is_sharded and not step.is_replay:
                    await step.gather()
                for portion in step.portions:
                    gradients, _ = model.backward(step.rng(portion))
                    step.add(portion, {name: one.astype(model.first.grad.dtype) for name, one in gradients.items()})
                    await asyncio.sleep(0.01)
                if is_sharded and not step.is_replay:
                    step.release()
                mean = await step.reduce("mean")
                on_step("reduced", step)
                if leaves_out:
                    trained = {parameter.name for parameter in model.parameters if parameter.requires_grad}
                    mean = {name: gradient for name, gradient in mean.items() if name in trained}
                await step.update(model.optimizer, mean, learning_rate=RATE)
                on_step("updated", step)
                if is_sharded and not step.is_replay:
                    await step.gather()
                    values = b"".join(parameter.value.tobytes() for parameter in model.parameters)
        if not is_sharded:
            values = b"".join(parameter.value.tobytes() for parameter in model.parameters)
        digest = (await state.lineage()).digest
    return Result(values, digest, model.optimizer.skipped)


def test_steps_are_those_of_an_optimizer_in_one_process() -> None:
    model = Model()
    for number in range(UNTIL):
        freeze(model.parameters, number)
        for portion in range(PORTIONS):
            gradients, _ = model.backward(portion_rng(SEED, number, portion))
            for parameter in model.parameters:
                parameter.accumulate((gradients[parameter.name] / PORTIONS).astype(np.float32))
        model.optimizer.step(RATE)
        model.optimizer.zero_grad()
    result = run_virtual(train())
    alone = np.concatenate([parameter.value.reshape(-1) for parameter in model.parameters])
    np.testing.assert_allclose(np.frombuffer(result.values, np.float32), alone, rtol=1e-4, atol=1e-6)
    assert result.skipped == model.optimizer.skipped == {"first": 3, "second": 3}


@pytest.mark.parametrize(("zero", "make"), in_turn([3, 1, 2], [HalfModel, Model]))
def test_sharded_optimizers_come_to_the_bits_of_whole_ones(zero: int, make: Callable[[], Model]) -> None:
    whole = run_virtual(train(make=make))
    assert run_virtual(train(make=make, zero=zero)).values == whole.values
    assert run_virtual(train(make=make, leaves_out=True)).values == whole.values


@pytest.mark.parametrize(("cut", "size"), in_turn(CUTS, [2, 3]))
def test_every_world_size_ends_with_the_bits_of_one_rank(size: int, cut: str) -> None:
    alone = run_virtual(train(**CUTS[cut]))

    async def main() -> list[Result]:
        async with ElasticWorlds(size) as worlds:
            tasks = [worlds.start(f"m{n}", lambda source: train(source, **CUTS[cut])) for n in range(size)]
            return list(await asyncio.gather(*tasks))

    assert run_virtual(main()) == [alone] * size


@pytest.mark.parametrize(("cut", "place", "number"), in_turn(CUTS, ["frozen", "reduced", "updated"], [1, 3, 6]))
def test_losses_and_newcomers_change_nothing_of_what_is_frozen(number: int, place: str, cut: str) -> None:
    alone = run_virtual(train(**CUTS[cut]))

    async def main() -> list[Result]:
        async with ElasticWorlds(3) as worlds:

            def kill(where: str, step: ElasticStep) -> None:
                if (where, step.number) == (place, number) and worlds.is_running("m1"):
                    asyncio.get_running_loop().call_soon(worlds.kill, "m1")
                    worlds.start("m3", lambda source: train(source, **CUTS[cut]))

            hooks = {"m1": kill}
            tasks = [
                worlds.start(f"m{n}", lambda source, n=n: train(source, **CUTS[cut], **_hook(hooks.get(f"m{n}"))))  # type: ignore[misc]
                for n in range(3)
            ]
            results = await asyncio.gather(tasks[0], tasks[2])
            return [*results, await worlds.tasks["m3"]]

    for result in run_virtual(main()):
        assert (result.digest, result.skipped) == (alone.digest, alone.skipped)
        if result.values:  # a newcomer may come too late for a step of its own
            assert result.values == alone.values


def _hook(on_step: OnStep | None) -> dict[str, Any]:
    return {} if on_step is None else {"on_step": on_step}


@pytest.mark.parametrize("cut", CUTS)
def test_ranks_that_differ_in_what_is_frozen_are_found(cut: str) -> None:
    async def other(source: WorldSource) -> Result:
        model: list[Model] = []

        def make() -> Model:
            model.append(Model())
            return model[0]

        def freeze_other(where: str, step: ElasticStep) -> None:
            if where == "frozen" and step.number == 2:
                model[0].second.requires_grad = False

        return await train(source, make=make, on_step=freeze_other, **CUTS[cut])

    async def main() -> list[Any]:
        async with ElasticWorlds(2) as worlds:
            tasks = [worlds.start("m0", lambda source: train(source, **CUTS[cut])), worlds.start("m1", other)]
            return await asyncio.gather(*tasks, return_exceptions=True)

    errors = run_virtual(main())
    assert all(isinstance(error, AsyncparError) for error in errors), errors
    assert all("frozen" in str(error) for error in errors), errors


async def train_rounds(source: WorldSource | None = None) -> tuple[bytes, bytes]:
    """Train in rounds of which some leave a parameter alone; return values and digest."""
    model, before = Model(), b""
    async with ap.elastic(portions=4, seed=SEED, source=source) as job:
        state = job.state(model.parameters, model.optimizer, outer=OuterConfig())
        async for current in job.rounds(state, steps=3, quorum=1.0, grace=0.5, until=6):
            async with current:
                model.second.requires_grad = current.number not in (2, 3)
                if current.number == 2:
                    before = model.second.value.tobytes()
                for portion in current.portions:
                    with current.worker(portion) as worker:
                        for step in range(current.steps):
                            gradients, _ = model.backward(current.rng(portion, step))
                            for parameter in model.parameters:
                                parameter.grad = gradients[parameter.name]
                            worker.optimizer.step(0.003)
                            await asyncio.sleep(0.01)
            if current.number in (2, 3) and current.is_committed:
                assert model.second.value.tobytes() == before
        values = b"".join(parameter.value.tobytes() for parameter in model.parameters)
        assert before not in values
        return values, (await state.lineage()).digest


@pytest.mark.parametrize("size", [2, 4])
def test_rounds_leave_frozen_parameters_alone(size: int) -> None:
    alone = run_virtual(train_rounds())

    async def main() -> list[tuple[bytes, bytes]]:
        async with ElasticWorlds(size) as worlds:
            return list(await asyncio.gather(*(worlds.start(f"m{n}", train_rounds) for n in range(size))))

    assert run_virtual(main()) == [alone] * size


async def train_pipeline(source: WorldSource | None = None) -> tuple[bytes, bytes]:
    """Train a pipeline whose middle stage is frozen for a while; return its values then, and the digest in the end."""
    model, kept = make_stages(), {}
    parameters = [parameter for stage in model for parameter in stage.parameters()]
    optimizer = Optimizer(parameters, Adam())
    async with ap.elastic(portions=PORTIONS, seed=SEED, source=source) as job:
        state = job.state(parameters, optimizer, pipeline=model)
        async for step in job.steps(state, until=6):
            async with step:
                for parameter in model[1].parameters():
                    parameter.requires_grad = step.number not in (2, 3)

                def sample(portion: int, number: int = step.number) -> Any:
                    return np.random.default_rng([number, portion]).standard_normal((5, 6)).astype(np.float32)

                gradients = await step.run_pipeline(sample, lambda p: sample(p)[:, :4] ** 2, squares, op="mean")
                await step.update(optimizer, gradients, learning_rate=RATE)
                await step.gather()
                kept[step.number] = b"".join(parameter.value.tobytes() for parameter in model[1].parameters())
        assert kept[1] == kept[2] == kept[3] != kept[4]
        return kept[3], (await state.lineage()).digest


@pytest.mark.parametrize("size", [2, 3, 6])
def test_pipelines_leave_frozen_stages_alone(size: int) -> None:
    alone = run_virtual(train_pipeline())

    async def main() -> list[tuple[bytes, bytes]]:
        async with ElasticWorlds(size) as worlds:
            return list(await asyncio.gather(*(worlds.start(f"m{n}", train_pipeline) for n in range(size))))

    assert run_virtual(main()) == [alone] * size
