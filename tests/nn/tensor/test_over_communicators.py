"""Cut models over real communicators: compute threads wait for each other through the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest

from asyncpar.core.concurrency.bridge import LoopBridge
from asyncpar.core.concurrency.worker import WorkerThread
from asyncpar.errors import OperationMismatch
from asyncpar.nn import Parameter, Transformer, TransformerConfig, softmax_cross_entropy
from asyncpar.nn.tensor import BridgedGroup, TensorGroup, build_stage, vocab_parallel_cross_entropy
from asyncpar.testing import local_world
from tests.nn.tensor.crew import whole_gradients

CONFIG = TransformerConfig(
    vocabulary=11, length=5, features=12, layers=2, heads=6, mlp_hidden=7, seed=5, dtype="float64"
)
WINDOWS = np.random.default_rng(0).integers(0, 11, (2, 6))
SCALE = 0.1

T = TypeVar("T")
OnAll = Callable[[Callable[[TensorGroup], T]], Any]


@asynccontextmanager
async def ranks(size: int) -> AsyncIterator[OnAll[Any]]:
    """Yield what runs a function on all ranks, each in its compute thread, and returns what they return."""
    async with local_world(size) as nodes:
        bridges = [LoopBridge() for _ in nodes]
        workers = [WorkerThread(f"of rank {rank}", bridge) for rank, bridge in enumerate(bridges)]
        groups = [BridgedGroup(node.world, bridge) for node, bridge in zip(nodes, bridges, strict=True)]

        async def on_all(function: Callable[[TensorGroup], T]) -> Sequence[T]:
            return await asyncio.gather(
                *(worker.run(function, group) for worker, group in zip(workers, groups, strict=True))
            )

        try:
            yield on_all
        finally:
            for worker in workers:
                worker.close()


def train(config: TransformerConfig, group: TensorGroup, *, sequence: bool) -> tuple[float, list[Parameter]]:
    model = build_stage(config, layers=range(2), is_first=True, is_last=True, group=group, sequence_parallel=sequence)
    logits, saved = model.forward(WINDOWS[:, :-1])
    loss, dy = vocab_parallel_cross_entropy(
        logits, WINDOWS[:, 1:], vocabulary=config.vocabulary, group=group, scale=SCALE
    )
    _, deferred = model.backward_input(saved, dy)
    model.backward_weight(deferred)
    return loss, list(model.parameters())


def train_whole(config: TransformerConfig) -> tuple[float, Transformer]:
    model = Transformer(config)
    logits, saved = model.forward(WINDOWS[:, :-1])
    loss, dy = softmax_cross_entropy(logits, WINDOWS[:, 1:], scale=SCALE)
    model.backward(saved, dy)
    return loss, model


@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-6)])
@pytest.mark.parametrize("size", [2, 3])
async def test_losses_and_gradients_are_those_of_one_process(
    size: int, dtype: str, tolerance: float, sequence: bool
) -> None:
    config = replace(CONFIG, dtype=dtype, tied_embeddings=size == 3)
    expected, model = train_whole(config)
    async with ranks(size) as on_all:
        results = await on_all(lambda group: train(config, group, sequence=sequence))
    assert len({loss for loss, _ in results}) == 1
    assert results[0][0] == pytest.approx(expected, rel=tolerance)
    gradients = whole_gradients([parameters for _, parameters in results])
    for parameter in model.parameters():
        bound = (1e-12 if dtype == "float64" else 1e-5) * np.abs(parameter.grad).max()
        np.testing.assert_allclose(gradients[parameter.name], parameter.grad, atol=bound, rtol=0)


async def test_replicated_gradients_are_the_same_bits_on_every_rank() -> None:
    async with ranks(3) as on_all:
        results = await on_all(lambda group: train(replace(CONFIG, dtype="float32"), group, sequence=False))
    copies = [
        {p.name: p.grad.tobytes() for p in parameters if p.placement.replicated is not None}
        for _, parameters in results
    ]
    assert len(copies[0]) == 1 + 6 * 2 + 2
    assert copies[0] == copies[1] == copies[2]


async def test_ranks_that_run_other_layers_fail_instead_of_waiting() -> None:
    """Rank 1 has half the batch: its first sum does not fit with that of rank 0."""

    def run(group: TensorGroup) -> str:
        model = build_stage(CONFIG, layers=range(2), is_first=True, is_last=True, group=group)
        with pytest.raises(OperationMismatch) as caught:
            model.forward(WINDOWS[group.rank :, :-1])
        return str(caught.value)

    async with ranks(2) as on_all:
        for message in await on_all(run):
            assert "float64[2,5,12]" in message
            assert "float64[1,5,12]" in message
