"""Wrappers that keep their ranks are refused in the worlds of an elastic job; replicas of one process are not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.backends import CommunicationRuntime
from asyncpar.collectives.communicator import Communicator
from asyncpar.elasticity.step import ElasticStep
from asyncpar.errors import UsageError
from asyncpar.gradsync import GradientSynchronizer
from asyncpar.nn.linear import Linear
from asyncpar.nn.optimizers import SGD, Optimizer
from asyncpar.nn.parameter import Initializer
from asyncpar.parallel import DataParallel, DistributedDataParallel
from asyncpar.zero import ZeROConfig, ZeROOptimizer, ZeROStage

ROWS = np.arange(24, dtype=np.float32).reshape(4, 6) / 24


def make_model() -> Linear:
    return Linear("layer", 6, 3, initializer=Initializer.from_seed(3))


async def with_ranks(communicator: Communicator) -> None:
    replicas = DataParallel(make_model(), ["cpu:0"], CommunicationRuntime.on(communicator))
    try:
        await replicas.forward(ROWS)
    finally:
        replicas.close()


async def wrapped(communicator: Communicator) -> None:
    DistributedDataParallel.on(communicator, make_model())


async def synchronized(communicator: Communicator) -> None:
    GradientSynchronizer.data_parallel(communicator)


async def sharded(communicator: Communicator) -> None:
    optimizer = ZeROOptimizer(SGD(), ZeROConfig(stage=ZeROStage.STAGE1), communicator)
    await optimizer.register_parameters(make_model().parameters())


async def of_part(communicator: Communicator) -> None:
    part = communicator.subgroup([0], name="part")
    assert part is not None
    await wrapped(part)


IN_STEP = r"run the model itself on each of step.portions, then step.add\(portion, gradients\), step.reduce"


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (wrapped, rf"DistributedDataParallel: expected ranks that stay, got those of generation 0 .*; {IN_STEP}"),
        (of_part, rf"DistributedDataParallel: expected ranks that stay, .*; {IN_STEP}"),
        (with_ranks, rf"DataParallel with a runtime: expected ranks that stay, .*; make it without one, and {IN_STEP}"),
        (synchronized, rf"GradientSynchronizer: expected ranks that stay, .*; {IN_STEP}.*job.rounds"),
        (sharded, r"ZeRO: expected ranks that stay, .*; use job.state\(parameters, optimizer, zero=1\), or 2, or 3"),
    ],
)
async def test_what_keeps_its_ranks_is_refused(use: Callable[[Communicator], Awaitable[None]], text: str) -> None:
    async with ap.elastic(portions=2) as job:
        model = make_model()
        state = job.state(model.parameters(), Optimizer(model.parameters(), SGD()))
        async for step in job.steps(state, until=1):
            with pytest.raises(UsageError, match=text):
                async with step:
                    await use(step.world)
            break


async def test_replicas_of_one_process_compute_the_gradients_of_portions() -> None:
    async def alone(model: Linear) -> list[Any]:
        y, saved = model.forward(ROWS)
        model.zero_grad()
        model.backward(saved, y / len(ROWS))
        return [parameter.grad.copy() for parameter in model.parameters()]

    async def with_replicas(model: DataParallel) -> list[Any]:
        model.zero_grad()
        y, saved = await model.forward(ROWS)
        await model.backward(saved, y / len(ROWS))
        await model.sync_gradients()
        return [parameter.grad.copy() for parameter in model.parameters()]

    plain, model = make_model(), make_model()
    async with DataParallel(model, ["cpu:0", "cpu:1"]) as replicas:
        wanted = await trained(plain, lambda: alone(plain))
        found = await trained(model, lambda: with_replicas(replicas))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


async def trained(model: Linear, gradients: Callable[[], Awaitable[list[Any]]]) -> list[Any]:
    """Return the parameters of ``model`` after some steps."""
    optimizer = Optimizer(model.parameters(), SGD())
    async with ap.elastic(portions=2) as job:
        state = job.state(model.parameters(), optimizer)
        async for step in job.steps(state, until=3):
            async with step:
                await one_step(step, optimizer, gradients)
    return [parameter.value for parameter in model.parameters()]


async def one_step(step: ElasticStep, optimizer: Optimizer, gradients: Callable[[], Awaitable[list[Any]]]) -> None:
    for portion in step.portions:
        step.add(portion, await gradients())
    await step.update(optimizer, await step.reduce("mean"), learning_rate=0.1)
