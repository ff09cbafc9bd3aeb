"""Models, data and worlds that the tests of data parallelism share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import numpy as np

from asyncpar.backends import CommunicationRuntime, existing
from asyncpar.nn import Array, Initializer, Linear, Mlp, Parameter, Sequential
from asyncpar.node import Node
from asyncpar.parallel import DDP_GROUP, DDPConfig, DistributedDataParallel, Module, OnGradient, init_process_group

T = TypeVar("T")

FEATURES = 4
OUTPUTS = 3

CONFIGS = {
    "default": DDPConfig(),
    "overlapping": DDPConfig(delay_all_reduce=False),
    "views": DDPConfig(gradient_as_bucket_view=True),
    "overlapping views": DDPConfig(gradient_as_bucket_view=True, delay_all_reduce=False),
    "find unused": DDPConfig(find_unused_parameters=True),
    "static": DDPConfig(static_graph=True, delay_all_reduce=False),
}


def make_model(seed: int = 0) -> Sequential:
    """Return a small model in double precision."""
    initializer = Initializer.from_seed(seed, "float64")
    return Sequential(
        [
            Linear("first", FEATURES, 6, initializer=initializer),
            Mlp("middle", 6, 8, initializer=initializer),
            Linear("last", 6, OUTPUTS, initializer=initializer),
        ]
    )


def make_batch(rows: int, seed: int = 1) -> tuple[Array, Array]:
    """Return inputs and targets."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, FEATURES)), rng.normal(size=(rows, OUTPUTS))


def loss_gradient(y: Array, target: Array) -> Array:
    """Return the gradient of the mean over rows of half the squared error."""
    gradient: Array = (y - target) / len(y)
    return gradient


def gradients_alone(model: Module, x: Array, target: Array) -> dict[str, Array]:
    """Return what one process gets from all rows."""
    model.zero_grad()
    y, saved = model.forward(x)
    model.backward(saved, loss_gradient(y, target))
    return gradients_of(model)


def gradients_of(model: Any) -> dict[str, Array]:
    return {parameter.name: parameter.grad.copy() for parameter in model.parameters()}


def values_of(model: Any) -> dict[str, Array]:
    return {parameter.name: parameter.value.copy() for parameter in model.parameters()}


def assert_same(got: Mapping[str, Array], expected: Mapping[str, Array], *, tolerance: float = 1e-12) -> None:
    assert list(got) == list(expected)
    for name in expected:
        np.testing.assert_allclose(got[name], expected[name], rtol=tolerance, atol=tolerance, err_msg=name)


def assert_equal_bits(results: Sequence[Mapping[str, Array]]) -> None:
    for other in results[1:]:
        for name, array in results[0].items():
            np.testing.assert_array_equal(other[name], array, err_msg=name)


def descend(model: Any, rate: float = 0.1) -> None:
    """Take a step of plain gradient descent."""
    for parameter in model.parameters():
        parameter.value[...] -= rate * parameter.grad


@asynccontextmanager
async def open_runtime(node: Node) -> AsyncIterator[CommunicationRuntime]:
    """Yield a runtime with the group of all ranks of the node's world."""
    runtime = CommunicationRuntime()
    runtime.register_backend("here", existing(node.world))
    timeout = node.world.timeout
    await init_process_group("here", runtime=runtime)
    node.world.timeout = timeout
    try:
        yield runtime
    finally:
        await runtime.finalize()


@asynccontextmanager
async def open_replica(node: Node, model: Module, **settings: Any) -> AsyncIterator[DistributedDataParallel]:
    """Yield a started replica of ``model``."""
    async with (
        open_runtime(node) as runtime,
        DistributedDataParallel(model, "cpu:0", DDP_GROUP, runtime, **settings) as ddp,
    ):
        yield ddp


async def train_step(ddp: DistributedDataParallel, x: Array, target: Array) -> None:
    """Compute gradients of a batch, from zero."""
    ddp.zero_grad()
    await accumulate(ddp, x, target)


async def accumulate(ddp: DistributedDataParallel, x: Array, target: Array) -> None:
    y, saved = await ddp.forward(x)
    await ddp.backward(saved, loss_gradient(y, target))


async def on_all(nodes: Sequence[Node], main: Callable[[Node], Awaitable[T]]) -> list[T]:
    """Run ``main`` on every rank at once and return the results in the order of ranks."""
    return list(await asyncio.gather(*(main(node) for node in nodes)))


async def on_all_failing(nodes: Sequence[Node], main: Callable[[Node], Awaitable[T]]) -> list[T | BaseException]:
    """As ``on_all``, with exceptions among the results."""
    return list(await asyncio.gather(*(main(node) for node in nodes), return_exceptions=True))


class Branches:
    """``y = x @ (sum of the weights of the chosen branches)``; only those are reached by the backward pass."""

    def __init__(self, *names: str) -> None:
        rng = np.random.default_rng(7)
        self._branches = {name: Parameter(name, rng.normal(size=(FEATURES, OUTPUTS))) for name in names}
        self.chosen: tuple[str, ...] = names

    def forward(self, x: Array) -> tuple[Array, tuple[Array, tuple[str, ...]]]:
        weight = sum((self._branches[name].value for name in self.chosen), np.zeros((FEATURES, OUTPUTS)))
        return x @ weight, (x, self.chosen)

    def backward(
        self, saved: tuple[Array, tuple[str, ...]], dy: Array, on_gradient: OnGradient | None = None
    ) -> Array | None:
        x, chosen = saved
        for name in chosen:
            self._branches[name].grad += x.T @ dy
            if on_gradient is not None:
                on_gradient(name)
        return None

    def parameters(self) -> Sequence[Parameter]:
        return list(self._branches.values())

    def zero_grad(self) -> None:
        for parameter in self._branches.values():
            parameter.zero_grad()
