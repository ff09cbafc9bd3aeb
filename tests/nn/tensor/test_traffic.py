"""Communication of a layer, to the call and to the byte."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asyncpar.core.concurrency.bridge import LoopBridge
from asyncpar.core.concurrency.worker import WorkerThread
from asyncpar.nn import Array, TransformerConfig
from asyncpar.nn.block import BlockOptions
from asyncpar.nn.tensor import (
    BridgedGroup,
    ParallelBlock,
    TensorGroup,
    TensorRegion,
    build_stage,
    vocab_parallel_cross_entropy,
)
from asyncpar.testing import local_world
from tests.nn.gradients import make_initializer
from tests.nn.tensor.crew import Call, run_ranks

BATCH, LENGTH, FEATURES = 2, 6, 12
BSH = BATCH * LENGTH * FEATURES * 8
"""Bytes of whole activations."""

REDUCE, GATHER, SCATTER = Call("all_reduce", BSH), Call("all_gather", BSH), Call("reduce_scatter", BSH)
CONFIG = TransformerConfig(vocabulary=10, length=LENGTH, features=FEATURES, layers=3, heads=6, dtype="float64")


def run_block(group: TensorGroup, record: Callable[[], None], *, sequence: bool = False) -> None:
    """Run a block forward, its input's gradient, and its parameters'; call ``record`` after each."""
    region = TensorRegion(group=group, sequence_parallel=sequence)
    stage = ParallelBlock(
        "block", FEATURES, 6, region=region, initializer=make_initializer(), options=BlockOptions(hidden=7)
    )
    start, stop = region.sequence_bounds(LENGTH)
    x = np.random.default_rng(0).normal(size=(BATCH, LENGTH, FEATURES))[:, start:stop].copy()
    y, saved = stage.forward(x)
    record()
    _, deferred = stage.backward_input(saved, y)
    record()
    stage.backward_weight(deferred)
    record()


def calls_of_block(size: int, *, sequence: bool) -> list[list[list[Call]]]:
    """Return what each rank exchanged in each of the three."""

    def run(group: Any) -> list[list[Call]]:
        recorded: list[list[Call]] = []

        def record() -> None:
            recorded.append(group.calls[:])
            group.calls.clear()

        run_block(group, record, sequence=sequence)
        return recorded

    return run_ranks(size, run)


@pytest.mark.parametrize("size", [2, 3])
def test_a_block_costs_two_all_reduces_forward_and_two_backward(size: int) -> None:
    assert calls_of_block(size, sequence=False) == [[[REDUCE] * 2, [REDUCE] * 2, []]] * size


@pytest.mark.parametrize("size", [2, 3])
def test_with_sequence_parallelism_each_becomes_a_gather_and_a_scatter(size: int) -> None:
    """And inputs of the two column-parallel layers are gathered again for the weights' gradients."""
    forward = backward = [GATHER, SCATTER] * 2
    assert calls_of_block(size, sequence=True) == [[forward, backward, [GATHER] * 2]] * size


def test_a_whole_model_adds_one_all_reduce_at_each_end_and_the_loss() -> None:
    def run(group: Any) -> dict[Call, int]:
        model = build_stage(CONFIG, layers=range(3), is_first=True, is_last=True, group=group)
        tokens = np.random.default_rng(0).integers(0, 10, (BATCH, LENGTH + 1))
        logits, saved = model.forward(tokens[:, :-1])
        _, dy = vocab_parallel_cross_entropy(logits, tokens[:, 1:], vocabulary=10, group=group, scale=1.0)
        model.backward(saved, dy)
        return dict(Counter(group.calls))

    positions = BATCH * LENGTH * 8
    loss = {Call("all_reduce_max", positions): 1, Call("all_reduce", 2 * positions): 1}
    assert run_ranks(2, run) == [{REDUCE: 4 * 3 + 2, **loss}] * 2


def test_the_input_gradient_travels_while_weight_gradients_are_computed() -> None:
    def run(group: Any) -> list[str]:
        events: list[str] = []
        start = group.start_all_reduce

        def start_all_reduce(x: Array) -> Callable[[], Array]:
            events.append("start")
            wait = start(x)

            def waiting() -> Array:
                events.append("wait")
                done: Array = wait()
                return done

            return waiting

        group.start_all_reduce = start_all_reduce
        stage = build_stage(CONFIG, layers=range(1, 2), is_first=False, is_last=False, group=group)
        x = np.random.default_rng(0).normal(size=(BATCH, LENGTH, FEATURES))
        y, saved = stage.forward(x)
        events.clear()
        stage.backward(saved, y, lambda name: events.append(name.removeprefix("block1/")))
        return events

    assert run_ranks(2, run)[0] == [
        "mlp/narrow/bias",
        "mlp/narrow/weight",
        "start",
        "mlp/widen/bias",
        "mlp/widen/weight",
        "wait",
        "second_norm/shift",
        "second_norm/scale",
        "attention/output/bias",
        "attention/output/weight",
        "start",
        "attention/project/weight",
        "wait",
        "first_norm/shift",
        "first_norm/scale",
    ]


@pytest.mark.parametrize("size", [2, 3])
async def test_communicators_count_four_all_reduces_of_whole_activations_per_layer(size: int) -> None:
    async with local_world(size, pin="all_reduce:0-inf@ring") as nodes:
        bridges = [LoopBridge() for _ in nodes]
        workers = [WorkerThread(f"of rank {rank}", bridge) for rank, bridge in enumerate(bridges)]
        groups = [BridgedGroup(node.world, bridge) for node, bridge in zip(nodes, bridges, strict=True)]
        before = [node.world.traffic for node in nodes]
        try:
            async with asyncio.TaskGroup() as tasks:
                for worker, group in zip(workers, groups, strict=True):
                    tasks.create_task(worker.run(run_block, group, lambda: None))
        finally:
            for worker in workers:
                worker.close()
        for node, earlier in zip(nodes, before, strict=True):
            assert not earlier.operations
            (entry,) = node.world.traffic.operations
            assert (entry.operation, entry.algorithm, entry.calls) == ("all_reduce", "ring", 4)
            assert entry.payload_bytes == 4 * BSH * 2 * (size - 1) // size
