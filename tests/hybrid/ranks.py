"""Coordinators on all ranks of a world, which take steps that fail, and steps after that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from asyncpar.errors import PeerError
from asyncpar.hybrid import HybridConfig, ParallelModel, ThreeDParallelismCoordinator, TransformerModel
from asyncpar.hybrid.recovery import StepTaken
from asyncpar.nn import Transformer, TransformerConfig, softmax_cross_entropy
from asyncpar.nn.optimizers import Optimizer, clip_factor
from asyncpar.node import Node
from asyncpar.testing import local_world
from tests.close_arrays import assert_close
from tests.hybrid.worlds import RATE, Array, draw_batch, gather

PATIENCE = 45.0
"""Seconds after which ranks are taken for hung."""

ROWS = 8

Outcomes = list[Any]
"""What each rank returned or raised."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """All ranks of a world; their every step is on the same batch."""

    model: TransformerConfig
    config: HybridConfig
    nodes: Sequence[Node]
    all: Sequence[ThreeDParallelismCoordinator]

    def batch_of(self, coordinator: ThreeDParallelismCoordinator) -> tuple[list[Array], list[Array]]:
        """Return the micro-batches of a rank's replica."""
        tokens, targets = draw_batch(self.model, 0, rows=ROWS)
        dp, replica = self.config.parallelism.dp_size, coordinator.groups.mapping.dp_rank
        own = slice(replica * ROWS // dp, (replica + 1) * ROWS // dp)
        parts = self.config.micro_batches
        return np.array_split(tokens[own], parts), np.array_split(targets[own], parts)

    def step(self, coordinator: ThreeDParallelismCoordinator) -> Coroutine[Any, Any, Any]:
        return coordinator.train_step(*self.batch_of(coordinator), learning_rate=RATE)

    def start(
        self, main: Callable[[ThreeDParallelismCoordinator], Coroutine[Any, Any, Any]] | None = None
    ) -> list[asyncio.Task[Any]]:
        """Begin ``main``, or a step, on all ranks."""
        return [asyncio.create_task((main or self.step)(one)) for one in self.all]

    async def take_step(self) -> list[float]:
        """Take a step on all ranks, which must work, and return the loss that each has.

        Before that they may all learn that the one before it was taken.
        """
        results = await outcomes_of(self.start())
        if all(isinstance(result, StepTaken) for result in results):
            results = await outcomes_of(self.start())
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result.loss for result in results]

    async def together(self, main: Callable[[ThreeDParallelismCoordinator], Coroutine[Any, Any, Any]]) -> Outcomes:
        """Return what ``main`` comes to on each rank; the first error ends all."""
        async with asyncio.timeout(PATIENCE):
            return await asyncio.gather(*map(main, self.all))

    def values(self) -> dict[tuple[str, str], Array]:
        """Return copies of all tensors."""
        return gather([[replace(piece, array=piece.array.copy()) for piece in one.pieces()] for one in self.all])


@asynccontextmanager
async def running(
    model: TransformerConfig, config: HybridConfig, make_model: Callable[[int], ParallelModel] | None = None
) -> AsyncIterator[Ranks]:
    """Make coordinators on a world of their own, and close them in the end.

    ``make_model`` makes the model of a rank.
    """
    async with local_world(config.parallelism.world_size) as nodes:
        made = [
            ThreeDParallelismCoordinator.create(
                config, make_model(node.rank) if make_model else TransformerModel(config=model), node.world
            )
            for node in nodes
        ]
        async with asyncio.timeout(PATIENCE):
            coordinators = await asyncio.gather(*made)
        try:
            yield Ranks(model=model, config=config, nodes=nodes, all=coordinators)
        finally:
            for coordinator in coordinators:
                await coordinator.close()


async def outcomes_of(tasks: Sequence[asyncio.Task[Any]]) -> Outcomes:
    """Wait for the tasks, for a while."""
    async with asyncio.timeout(PATIENCE):
        return await asyncio.gather(*tasks, return_exceptions=True)


@lru_cache(maxsize=16)
def alone_after(model: TransformerConfig, config: HybridConfig, updates: int) -> dict[tuple[str, str], Array]:
    """Return what one process has after so many steps on the batch of ``Ranks``."""
    transformer = Transformer(model)
    optimizer = Optimizer(transformer.parameters(), config.rule)
    tokens, targets = draw_batch(model, 0, rows=ROWS)
    for _ in range(updates):
        optimizer.zero_grad()
        logits, saved = transformer.forward(tokens)
        _, gradient = softmax_cross_entropy(logits, targets, scale=1.0 / targets.size)
        transformer.backward(saved, gradient)
        if config.clip_norm is not None:
            optimizer.scale(clip_factor(float(np.sqrt(optimizer.squared_norm())), config.clip_norm))
        optimizer.step(RATE)
    tensors = {(parameter.name, "value"): parameter.value for parameter in optimizer.parameters}
    for parameter in optimizer.parameters:
        tensors |= {(parameter.name, kind): array for kind, array in optimizer.state(parameter.name).items()}
    return tensors


def assert_has_taken(ranks: Ranks, updates: int) -> None:
    """All ranks together hold what one process has after so many steps."""
    expected, got = alone_after(ranks.model, ranks.config, updates), ranks.values()
    assert got.keys() == expected.keys()
    for key, values in got.items():
        assert_close(values, expected[key], rtol=1e-10, atol=1e-10, message=str(key))


def assert_names(outcome: Any, culprit: int) -> None:
    """It is a typed error that names the rank whose fault it is."""
    assert isinstance(outcome, PeerError), repr(outcome)
    assert outcome.rank == culprit, repr(outcome)
