"""Replicas of a small model that ranks train on their own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import numpy as np

from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.parallel import RankMapping, ThreeDParallelismConfig
from asyncpar.gradsync import GradientBucketingConfig, GradientCompressionConfig, GradientSynchronizer
from asyncpar.nn import Array, Parameter
from asyncpar.node import Node

T = TypeVar("T")

SHAPES: dict[str, tuple[int, ...]] = {"weight": (40, 30), "bias": (30,), "scale": ()}
INT8 = GradientCompressionConfig(codec="int8")
NO_COMPRESSION = GradientCompressionConfig()


class Replica:
    """Minimizes half the squared distance to a target of its own by plain gradient descent."""

    def __init__(self, rank: int, *, dtype: str = "float64") -> None:
        rng = np.random.default_rng(5)
        self.parameters = [Parameter(name, rng.normal(size=shape).astype(dtype)) for name, shape in SHAPES.items()]
        targets = np.random.default_rng((6, rank))
        self._targets = [targets.normal(size=shape) for shape in SHAPES.values()]

    def compute(self) -> None:
        """Set the gradients."""
        for parameter, target in zip(self.parameters, self._targets, strict=True):
            parameter.grad[...] = parameter.value - target

    def descend(self, rate: float = 0.1) -> None:
        """Move against the gradients."""
        for parameter in self.parameters:
            parameter.value -= rate * parameter.grad

    def train(self, steps: int = 1) -> None:
        """Make steps of its own."""
        for _ in range(steps):
            self.compute()
            self.descend()

    def values(self) -> list[Array]:
        """Return copies of the parameters' values."""
        return [parameter.value.copy() for parameter in self.parameters]

    def bits(self) -> bytes:
        """Return all bits of the parameters."""
        return b"".join(value.tobytes() for value in self.values())


def make_synchronizer(
    communicator: Communicator,
    *,
    compression: GradientCompressionConfig = NO_COMPRESSION,
    bucketing: GradientBucketingConfig | None = None,
    name: str = "rounds",
) -> GradientSynchronizer:
    config = ThreeDParallelismConfig(dp_size=communicator.size)
    mapping = RankMapping(config, communicator.rank)
    return GradientSynchronizer(
        config, mapping, communicator=communicator, compression=compression, bucketing=bucketing, name=name
    )


async def on_all(nodes: Sequence[Node], main: Callable[[Node], Awaitable[T]]) -> list[T]:
    """Run ``main`` on every rank at once and return the results in the order of ranks."""
    return list(await asyncio.gather(*(main(node) for node in nodes)))


async def on_all_failing(nodes: Sequence[Node], main: Callable[[Node], Awaitable[T]]) -> list[T | BaseException]:
    """As ``on_all``, with exceptions among the results."""
    return list(await asyncio.gather(*(main(node) for node in nodes), return_exceptions=True))
