"""A model cut into virtual stages, and what one process gets of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, TypeVarTuple

import numpy as np

from asyncpar.core.concurrency.worker import WorkerThread
from asyncpar.nn import Initializer, LayerNorm, Linear, Mlp, Sequential, Stage
from asyncpar.nn.parameter import Array
from asyncpar.pipeline import Schedule
from asyncpar.pipeline.executor import PipelineExecutor
from asyncpar.pipeline.result import PipelineResult
from tests.pipeline.worlds import Ranks

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

FEATURES = 4
Cut = Callable[[int], list[Stage[Any]]]


class InlineCompute:
    """Computes on the loop, which is quicker for small sizes; lets others run in between."""

    async def run(self, function: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        await asyncio.sleep(0)
        return function(*arguments)


def cut_model(count: int) -> list[Stage[Any]]:
    """Return ``count`` stages, equal wherever they are made."""
    initializer = Initializer.from_seed(3, "float64")
    return [
        Sequential(
            [
                LayerNorm(f"norm{place}", FEATURES, initializer=initializer),
                Mlp(f"mlp{place}", FEATURES, 6, initializer=initializer),
                Linear(f"linear{place}", FEATURES, FEATURES, initializer=initializer),
            ]
        )
        for place in range(count)
    ]


def square_loss(y: Array, target: Array) -> tuple[float, Array]:
    """Half the sum of squared differences."""
    difference = y - target
    return 0.5 * float((difference * difference).sum()), difference


def make_samples(count: int, *, rows: Callable[[int], int] = lambda _: 2) -> tuple[list[Array], list[Array]]:
    """Return inputs and targets; ``rows`` gives the size of each micro-batch."""
    rng = np.random.default_rng(11)
    shapes = [(rows(number), 3, FEATURES) for number in range(count)]
    return [rng.normal(size=shape) for shape in shapes], [rng.normal(size=shape) for shape in shapes]


def gradients_of(stages: Sequence[Stage[Any]]) -> dict[str, Array]:
    return {parameter.name: parameter.grad.copy() for stage in stages for parameter in stage.parameters()}


def alone(
    stages: Sequence[Stage[Any]], inputs: Sequence[Any], targets: Sequence[Any], loss: Any = square_loss
) -> tuple[list[float], dict[str, Array]]:
    """Return losses and gradients of one process that does one micro-batch after another."""
    return pass_through(stages, inputs, targets, loss), gradients_of(stages)


def pass_through(
    stages: Sequence[Stage[Any]],
    inputs: Sequence[Any],
    targets: Sequence[Any],
    loss: Any,
    *,
    in_flight: int = 1,
    is_split: bool = False,
) -> list[float]:
    """Take all micro-batches forward and backward, ``in_flight`` at a time; return the losses.

    With ``is_split`` weight gradients come after the gradients of all inputs.
    """
    losses: list[float] = []
    waiting: list[tuple[list[Any], Any]] = []

    def backward() -> None:
        kept, dy = waiting.pop(0)
        deferred = []
        for stage in reversed(stages):
            if is_split:
                dy, later = stage.backward_input(kept.pop(), dy)
                deferred.append((stage, later))
            else:
                dy = stage.backward(kept.pop(), dy)
        for stage, later in deferred:
            stage.backward_weight(later)

    for x, target in zip(inputs, targets, strict=True):
        kept = []
        for stage in stages:
            x, saved = stage.forward(x)
            kept.append(saved)
        value, dy = loss(x, target)
        losses.append(value)
        waiting.append((kept, dy))
        if len(waiting) == in_flight:
            backward()
    while waiting:
        backward()
    return losses


def make_executors(
    schedule: Schedule,
    ranks: Ranks,
    *,
    cut: Cut = cut_model,
    loss: Any = square_loss,
    compute: Callable[[], Any] = InlineCompute,
    change: Callable[[Stage[Any]], Stage[Any]] = lambda stage: stage,
    **options: Any,
) -> tuple[list[PipelineExecutor], list[list[Stage[Any]]]]:
    """Return the executor of each rank, and its stages."""
    executors, held = [], []
    for rank, communicator in enumerate(ranks.communicators):
        whole = cut(schedule.num_virtual_stages)
        held.append([change(whole[virtual]) for virtual in schedule.virtual_stages_of(rank)])
        executors.append(
            PipelineExecutor(
                schedule,
                held[-1],
                communicator=communicator,
                compute=compute(),
                loss=loss,
                **{name: make() for name, make in options.items()},
            )
        )
    return executors, held


async def run_all(
    executors: Sequence[PipelineExecutor], inputs: Sequence[Any], targets: Sequence[Any]
) -> list[PipelineResult]:
    """Run on all ranks; only those that need them get inputs and targets."""
    return await asyncio.gather(
        *(
            executor.run(inputs if executor.has_first_stage else None, targets if executor.has_last_stage else None)
            for executor in executors
        )
    )


def make_worker() -> WorkerThread:
    return WorkerThread("test")
