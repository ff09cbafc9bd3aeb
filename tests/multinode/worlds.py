"""Multi-node worlds in one process, a small model, and what one process makes of the same batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import numpy as np

from asyncpar.collectives.communicator import Communicator
from asyncpar.multinode import MultiNodeConfig, MultiNodeTrainer
from asyncpar.nn import Array, Parameter
from asyncpar.nn.optimizers import AdamW, Optimizer, Rule
from asyncpar.node import Node
from asyncpar.testing.world import local_world
from asyncpar.zero import ZeROConfig, ZeROStage

T = TypeVar("T")

PATIENCE = 55.0
"""Seconds after which ranks are taken for hung."""

SHAPES: dict[str, tuple[int, ...]] = {"embedding": (7, 5), "weight": (11, 6), "bias": (6,), "scale": ()}
RULE = AdamW(weight_decay=0.1)
RATE = 0.05
TINY_BUCKETS = 0.0001
"""MiB: about 13 float64 values."""


class Model:
    """Parameters whose gradient of a micro-batch is their distance from targets drawn for it."""

    def __init__(self, *, seed: int = 5, dtype: str = "float64") -> None:
        rng = np.random.default_rng(seed)
        self.parameters = [Parameter(name, rng.normal(size=shape).astype(dtype)) for name, shape in SHAPES.items()]

    def targets(self, batch: Sequence[int]) -> list[Array]:
        """Return the targets of a micro-batch, named by step, rank and number."""
        rng = np.random.default_rng((6, *batch))
        return [rng.normal(size=shape) for shape in SHAPES.values()]

    def backward(self, *batch: int, ready: Callable[[str], None] | None = None) -> None:
        """Add the gradients of a micro-batch, last parameter first."""
        for parameter, target in reversed(list(zip(self.parameters, self.targets(batch), strict=True))):
            parameter.accumulate(parameter.value - target)
            if ready is not None:
                ready(parameter.name)

    def values(self) -> dict[str, Array]:
        """Return copies by name."""
        return {parameter.name: parameter.value.copy() for parameter in self.parameters}

    def gradients(self) -> dict[str, Array]:
        """Return copies by name."""
        return {parameter.name: parameter.grad.copy() for parameter in self.parameters}


def train_alone(
    world_size: int, *, steps: int, micro_steps: int = 1, rule: Rule = RULE, dtype: str = "float64"
) -> Model:
    """Return the model that one process has after training on the batches of all ranks."""
    model = Model(dtype=dtype)
    optimizer = Optimizer(model.parameters, rule)
    for step in range(steps):
        for rank in range(world_size):
            for micro in range(micro_steps):
                model.backward(step, rank, micro)
        for parameter in model.parameters:
            parameter.accumulate(parameter.grad * (1.0 / (world_size * micro_steps) - 1.0))
        optimizer.step(RATE)
        optimizer.zero_grad()
    return model


class Member:
    """One rank: its trainer and its replica."""

    def __init__(self, trainer: MultiNodeTrainer, model: Model) -> None:
        self.trainer = trainer
        self.model = model
        self.rank = trainer.config.global_rank

    async def step(self, step: int, *, micro_steps: int = 1, overlaps: bool = False) -> float:
        """Train on the batches of a step and return the norm of the gradients."""
        trainer, model = self.trainer, self.model
        for micro in range(micro_steps - overlaps):
            model.backward(step, self.rank, micro)
            trainer.update_gradients()
        if overlaps:
            async with trainer.synchronization() as ready:
                model.backward(step, self.rank, micro_steps - 1, ready=ready)
        else:
            await trainer.synchronize_gradients()
        await trainer.apply_gradients(micro_steps)
        return await trainer.optimizer_step(RATE)

    async def train(self, steps: int, *, micro_steps: int = 1, overlaps: bool = False) -> None:
        """Train on the batches of the first steps."""
        for step in range(steps):
            await self.step(step, micro_steps=micro_steps, overlaps=overlaps)


def config_of(
    rank: int, nodes: int, devices: int, *, stage: ZeROStage = ZeROStage.NONE, **settings: Any
) -> MultiNodeConfig:
    """Return the configuration of a rank, by default without sharding."""
    settings.setdefault("zero_config", ZeROConfig(stage=stage))
    return MultiNodeConfig.of_rank(nodes, devices, rank, **settings)


@asynccontextmanager
async def node_world(nodes: int, devices: int, *, transport: str = "inproc") -> AsyncIterator[tuple[Node, ...]]:
    """Yield the ranks of ``nodes`` hosts with ``devices`` ranks each."""
    hosts = [f"host{rank // devices}" for rank in range(nodes * devices)]
    async with local_world(nodes * devices, hosts=hosts, transport=transport) as world, asyncio.timeout(PATIENCE):
        yield world


@asynccontextmanager
async def members(
    nodes: int,
    devices: int,
    *,
    rule: Rule = RULE,
    dtype: str = "float64",
    seeds: Callable[[int], int] = lambda rank: 5 + rank,
    wrap: Callable[[Communicator], Communicator] = lambda communicator: communicator,
    **settings: Any,
) -> AsyncIterator[list[Member]]:
    """Yield trainers with registered parameters, which begin with other values on each rank by default."""
    async with node_world(nodes, devices) as world:
        made = [
            Member(
                MultiNodeTrainer(config_of(node.rank, nodes, devices, **settings), rule, communicator=wrap(node.world)),
                Model(seed=seeds(node.rank), dtype=dtype),
            )
            for node in world
        ]
        await on_all(made, _begin)
        yield made
        await on_all(made, lambda member: member.trainer.finalize())


async def _begin(member: Member) -> None:
    await member.trainer.initialize_environment()
    await member.trainer.register_parameters(member.model.parameters)


async def on_all(ranks: Sequence[T], main: Callable[[T], Awaitable[Any]]) -> list[Any]:
    """Run ``main`` on every rank at once; results are in the order of ranks, the first error ends all."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(_awaited(main(rank))) for rank in ranks]
    return [task.result() for task in running]


async def on_all_failing(ranks: Sequence[T], main: Callable[[T], Awaitable[object]]) -> list[BaseException]:
    """Run ``main`` on every rank at once and return the error of each."""
    results = await asyncio.gather(*(main(rank) for rank in ranks), return_exceptions=True)
    for rank, result in enumerate(results):
        assert isinstance(result, BaseException), f"rank {rank} went on as if nothing were wrong"
    return [result for result in results if isinstance(result, BaseException)]


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable
