"""Runs of the coordinator over real ranks in one process, and of one process alone, to compare them with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.parallel import ThreeDParallelismConfig
from asyncpar.hybrid import HybridConfig, StepResult, ThreeDParallelismCoordinator, TransformerModel
from asyncpar.nn import Transformer, TransformerConfig, softmax_cross_entropy
from asyncpar.nn.optimizers import Optimizer, clip_factor
from asyncpar.testing import local_world
from tests.close_arrays import assert_close

T = TypeVar("T")
Array = NDArray[Any]

TINY = TransformerConfig(vocabulary=13, length=6, features=8, layers=2, heads=4, dtype="float64")
RATE = 0.01
PATIENCE = 60.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Losses and norms by step, and all tensors, gathered: values and states by (name, kind)."""

    losses: list[float]
    norms: list[float]
    tensors: dict[tuple[str, str], Array]


def draw_batch(model: TransformerConfig, step: int, *, rows: int) -> tuple[Array, Array]:
    """Return the tokens and targets of the whole batch of ``step``."""
    windows = np.random.default_rng([7, step]).integers(0, model.vocabulary, (rows, model.length + 1))
    return windows[:, :-1], windows[:, 1:]


def train_alone(model: TransformerConfig, config: HybridConfig, *, rows: int, steps: int = 2) -> Outcome:
    """Train on whole batches with none of the parallel code."""
    transformer = Transformer(model)
    optimizer = Optimizer(transformer.parameters(), config.rule)
    losses, norms = [], []
    for step in range(steps):
        tokens, targets = draw_batch(model, step, rows=rows)
        optimizer.zero_grad()
        logits, saved = transformer.forward(tokens)
        loss, gradient = softmax_cross_entropy(logits, targets, scale=1.0 / targets.size)
        transformer.backward(saved, gradient)
        losses.append(loss / targets.size)
        norms.append(float(np.sqrt(optimizer.squared_norm())))
        if config.clip_norm is not None:
            optimizer.scale(clip_factor(norms[-1], config.clip_norm))
        optimizer.step(RATE)
    tensors = {}
    for parameter in optimizer.parameters:
        tensors[parameter.name, "value"] = parameter.value
        for kind, array in optimizer.state(parameter.name).items():
            tensors[parameter.name, kind] = array
    return Outcome(losses=losses, norms=norms, tensors=tensors)


async def on_ranks(
    size: int, main: Callable[[Communicator], Awaitable[T]], *, transport: str = "inproc", patience: float = PATIENCE
) -> list[T]:
    """Run ``main`` on every rank of a world; results are in the order of ranks."""
    async with local_world(size, transport=transport) as nodes, asyncio.timeout(patience), asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(_awaited(main(node.world))) for node in nodes]
    return [task.result() for task in running]


async def train_together(
    model: TransformerConfig, config: HybridConfig, *, rows: int, steps: int = 2, **options: Any
) -> Outcome:
    """Train over ``config.parallelism.world_size`` ranks, and gather everything."""

    async def main(world: Communicator) -> tuple[list[StepResult], list[Any]]:
        made = await ThreeDParallelismCoordinator.create(config, TransformerModel(config=model, **options), world)
        async with made as coordinator:
            results = [await train_step(coordinator, model, step, rows=rows) for step in range(steps)]
            pieces = coordinator.pieces()
            return results, [replace(piece, array=piece.array.copy()) for piece in pieces]

    every = await on_ranks(config.parallelism.world_size, main)
    first = every[0][0]
    for results, _ in every[1:]:
        assert [(one.loss, one.gradient_norm) for one in results] == [(one.loss, one.gradient_norm) for one in first]
    return Outcome(
        losses=[result.loss for result in first],
        norms=[result.gradient_norm for result in first],
        tensors=gather([pieces for _, pieces in every]),
    )


async def train_step(
    coordinator: ThreeDParallelismCoordinator, model: TransformerConfig, step: int, *, rows: int
) -> StepResult:
    """Take a step on the batch of ``step``, of which every replica has its rows, cut into micro-batches."""
    config, mapping = coordinator.config, coordinator.groups.mapping
    tokens, targets = draw_batch(model, step, rows=rows)
    own = slice(
        mapping.dp_rank * rows // config.parallelism.dp_size, (mapping.dp_rank + 1) * rows // config.parallelism.dp_size
    )
    inputs = np.array_split(tokens[own], config.micro_batches)
    return await coordinator.train_step(inputs, np.array_split(targets[own], config.micro_batches), learning_rate=RATE)


def gather(every: Sequence[Sequence[Any]]) -> dict[tuple[str, str], Array]:
    """Put the pieces of all ranks together; what several hold must be the same to the last bit on replicas."""
    wholes: dict[tuple[str, str], Array] = {}
    flats: dict[tuple[str, str, Any], Array] = {}
    slices: dict[tuple[str, str, Any], Any] = {}
    for pieces in every:
        for piece in pieces:
            key = (piece.parameter, piece.kind, (piece.slice.start, piece.slice.stop))
            flat = flats.setdefault(key, np.full(int(np.prod(piece.slice.local_shape)), np.nan, piece.array.dtype))
            slices[key] = piece.slice
            start, stop = piece.flat
            known = flat[start:stop][~np.isnan(flat[start:stop])]
            assert not known.size or np.array_equal(flat[start:stop], piece.array), f"{key}: replicas differ"
            flat[start:stop] = piece.array
    for (name, kind, _), flat in flats.items():
        part = slices[name, kind, _]
        whole = wholes.setdefault((name, kind), np.full(part.global_shape, np.nan, flat.dtype))
        part.put(flat.reshape(part.local_shape), whole)
    return wholes


def assert_same(one: Outcome, other: Outcome, *, tolerance: float) -> None:
    """Losses, norms, values and states agree; absolute and relative to the largest value."""
    np.testing.assert_allclose(one.losses, other.losses, rtol=tolerance)
    np.testing.assert_allclose(one.norms, other.norms, rtol=10 * tolerance)
    assert one.tensors.keys() == other.tensors.keys()
    for key, values in one.tensors.items():
        assert_close(values, other.tensors[key], rtol=tolerance, atol=tolerance, message=str(key))


def make_config(dp: int = 1, tp: int = 1, pp: int = 1, *, layers: int = 2, **settings: Any) -> HybridConfig:
    """Return the settings of a run; those of the layout of ranks are known by their names."""
    of_layout = {
        name: settings.pop(name) for name in list(settings) if name in ThreeDParallelismConfig.__dataclass_fields__
    }
    return HybridConfig(
        parallelism=ThreeDParallelismConfig(dp_size=dp, tp_size=tp, pp_size=pp, num_layers=layers, **of_layout),
        **settings,
    )


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable
