"""Replicas of a small model, sharded or not, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np

from asyncpar.nn import Array, Parameter
from asyncpar.nn.half import HalfParameter
from asyncpar.nn.optimizers import Adam, Rule
from asyncpar.testing.world import local_world
from asyncpar.zero import ZeROConfig, ZeroEngine, ZeROStage

T = TypeVar("T")

SHAPES = {"embedding": (7, 5), "layer/weight": (5, 4), "layer/bias": (4,), "scale": (), "none": (0, 3), "head": (4, 11)}
"""Shapes that no number of ranks divides, one without values, and one without dimensions."""

EVEN_SHAPES = {"a": (12, 4), "b": (24,), "c": (6, 8)}
"""Shapes that 1, 2, 3 and 4 ranks divide."""

PATIENCE = 60.0
"""Seconds after which a test gives up: nothing here may hang."""


def draw_parameters(
    shapes: dict[str, tuple[int, ...]] | None = None, dtype: str = "float32", *, seed: int = 0
) -> list[Parameter]:
    """Return parameters that depend on the arguments alone; ``dtype`` may be one of half precision."""
    rng = np.random.default_rng(seed)
    parameters: list[Parameter] = []
    for name, shape in (SHAPES if shapes is None else shapes).items():
        value = np.asarray(rng.normal(size=shape))
        if dtype in ("float32", "float64"):
            parameters.append(Parameter(name, value.astype(dtype)))
        else:
            parameters.append(HalfParameter(name, value.astype(np.float32), storage=dtype))
    return parameters


def draw_gradient(name: str, shape: tuple[int, ...], *, rank: int, step: int) -> Array:
    """Return the gradient that ``rank`` finds in ``step``, in float64."""
    return _drawn(name, shape, rank, step)


@lru_cache(maxsize=64)
def _drawn(name: str, shape: tuple[int, ...], rank: int, step: int) -> Array:
    rng = np.random.default_rng([rank, step, *name.encode()])
    drawn = np.asarray(rng.normal(size=shape))
    drawn.flags.writeable = False
    return drawn


def give_gradients(parameters: Sequence[Parameter], *, rank: int, step: int) -> None:
    """Add this rank's gradients to ``parameters``."""
    for parameter in parameters:
        gradient = draw_gradient(parameter.name, parameter.shape, rank=rank, step=step)
        parameter.accumulate(gradient.astype(parameter.dtype))


@asynccontextmanager
async def engines(
    size: int,
    stage: ZeROStage = ZeROStage.STAGE1,
    *,
    rule: Rule | None = None,
    shapes: dict[str, tuple[int, ...]] | None = None,
    dtype: str = "float32",
    transport: str = "inproc",
    is_prepared: bool = True,
    patience: float = PATIENCE,
    **settings: Any,
) -> AsyncIterator[list[ZeroEngine]]:
    """Yield the engines of all ranks."""
    config = ZeROConfig(stage=stage, **settings)
    async with local_world(size, transport=transport) as nodes, asyncio.timeout(patience):
        made = [
            ZeroEngine(draw_parameters(shapes, dtype), rule or Adam(weight_decay=0.1), config, node.world)
            for node in nodes
        ]
        if is_prepared:
            await on_all(made, lambda engine: engine.prepare())
        yield made


async def on_all(each: Sequence[Any], main: Callable[[Any], Awaitable[T]]) -> list[T]:
    """Run ``main`` for all ranks at once; the first error ends all."""

    async def awaited(one: Any) -> T:
        return await main(one)

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(awaited(one)) for one in each]
    return [task.result() for task in running]


async def outcomes(each: Sequence[Any], main: Callable[[Any], Awaitable[object]]) -> list[object]:
    """Run ``main`` for all ranks at once and return what each came to, or raised."""
    return await asyncio.gather(*(main(one) for one in each), return_exceptions=True)


async def take_step(engine: ZeroEngine, step: int, *, learning_rate: float = 0.05) -> None:
    """One step on the gradients of ``step``, reported in the order of a backward pass."""
    engine.zero_grad()
    give_gradients(engine.parameters, rank=engine.communicator.rank, step=step)
    for parameter in reversed(engine.parameters):
        engine.ready(parameter.name)
    await engine.reduce()
    await engine.step(learning_rate)


async def take_steps(made: Sequence[ZeroEngine], *steps: int) -> None:
    """Take ``steps`` on all ranks, one after another."""
    for step in steps:
        await on_all(made, partial(take_step, step=step))


async def whole_values(engine: ZeroEngine) -> dict[str, Array]:
    """Return copies of all values, computed with."""
    is_sharded = engine.config.stage.shards_parameters
    if is_sharded:
        await engine.gather()
    values = {parameter.name: np.array(parameter.value) for parameter in engine.parameters}
    if is_sharded:
        engine.release()
    return values
