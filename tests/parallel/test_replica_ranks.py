"""Replicas of several processes learn as one, each process with several of them."""

from __future__ import annotations

import numpy as np
import pytest

from asyncpar.errors import UsageError
from asyncpar.nn import Array
from asyncpar.node import Node
from asyncpar.parallel import DataParallel, SynchronizationMode
from asyncpar.testing import local_world
from tests.parallel.replicas import (
    assert_equal_bits,
    assert_same,
    gradients_alone,
    gradients_of,
    loss_gradient,
    make_batch,
    make_model,
    on_all,
    on_all_failing,
    open_runtime,
    values_of,
)

DEVICES = ["cpu:0", "cpu:1"]


async def backward(parallel: DataParallel, x: Array, target: Array, *, rows: int) -> None:
    """Run both passes; the loss is the mean over ``rows``."""
    y, saved = await parallel.forward(x)
    await parallel.backward(saved, loss_gradient(y, target))


@pytest.mark.parametrize("sizes", [(4, 4), (6, 1), (5, 0), (2, 3)], ids=str)
async def test_gradients_are_those_of_all_rows_of_all_ranks(sizes: tuple[int, int]) -> None:
    x, target = make_batch(sum(sizes))

    async def main(node: Node) -> tuple[dict[str, Array], dict[str, Array]]:
        model = make_model(seed=node.rank)
        mine = slice(0, sizes[0]) if node.rank == 0 else slice(sizes[0], None)
        async with open_runtime(node) as runtime, DataParallel(model, DEVICES, runtime) as parallel:
            parallel.zero_grad()
            if sizes[node.rank]:
                await backward(parallel, x[mine], target[mine], rows=len(x))
            await parallel.sync_gradients()
            assert_equal_bits([gradients_of(replica) for replica in parallel.replicas])
            return values_of(model), gradients_of(model)

    async with local_world(2) as nodes:
        results = await on_all(nodes, main)
    assert_equal_bits([values for values, _ in results])
    assert_equal_bits([gradients for _, gradients in results])
    assert_same(results[0][0], values_of(make_model(seed=0)))
    assert_same(results[1][1], gradients_alone(make_model(seed=0), x, target))


async def test_without_any_rows_gradients_stay_as_they_are() -> None:
    async def main(node: Node) -> float:
        model = make_model()
        async with open_runtime(node) as runtime, DataParallel(model, DEVICES, runtime) as parallel:
            model.parameters()[0].grad[...] = 7.0
            await parallel.sync_gradients()
            return float(model.parameters()[0].grad.min())

    async with local_world(2) as nodes:
        assert await on_all(nodes, main) == [7.0, 7.0]


async def test_what_fails_on_one_rank_raises_on_all_and_they_can_go_on() -> None:
    x, target = make_batch(4)

    async def main(node: Node) -> dict[str, Array]:
        model = make_model()
        async with open_runtime(node) as runtime, DataParallel(model, DEVICES, runtime) as parallel:
            y, saved = await parallel.forward(x)
            dy = loss_gradient(y, target)
            if node.rank:
                with pytest.raises(ValueError, match=r"shape|mismatch|dimension"):
                    await parallel.backward(saved, np.zeros((4, 99)))
            else:
                await parallel.backward(saved, dy)
            with pytest.raises(UsageError, match="a replica of rank 1 failed in its backward pass"):
                await parallel.sync_gradients()
            parallel.zero_grad()
            await backward(parallel, x, target, rows=4)
            await parallel.sync_gradients()
            return gradients_of(model)

    async with local_world(2) as nodes:
        for gradients in await on_all(nodes, main):
            assert_same(gradients, gradients_alone(make_model(), x, target))


async def test_models_that_differ_are_refused_on_all_ranks() -> None:
    async def main(node: Node) -> None:
        model = make_model()
        if node.rank:
            model.parameters()[0].name = "other"
        async with open_runtime(node) as runtime, DataParallel(model, DEVICES, runtime):
            pytest.fail("it was entered")

    async with local_world(2) as nodes:
        for error in await on_all_failing(nodes, main):
            assert isinstance(error, UsageError)
            assert "where rank 0 has" in str(error)


async def test_over_ranks_replicas_are_synchronous() -> None:
    async def main(node: Node) -> None:
        async with open_runtime(node) as runtime, DataParallel(make_model(), DEVICES, runtime) as parallel:
            parallel.set_sync_mode(SynchronizationMode.SYNCHRONOUS)
            with pytest.raises(
                UsageError, match="mode: expected synchronous with a runtime of 2 ranks, got asynchronous"
            ):
                parallel.set_sync_mode(SynchronizationMode.ASYNCHRONOUS)

    async with local_world(2) as nodes:
        await on_all(nodes, main)
