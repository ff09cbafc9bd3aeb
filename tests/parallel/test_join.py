"""Ranks with different numbers of inputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from asyncpar.errors import PeerCancelled, PeerLost, UsageError
from asyncpar.nn import Array
from asyncpar.nn.optimizers import AdamW, Optimizer
from asyncpar.node import Node
from asyncpar.parallel import DDP_GROUP, DDPConfig, DistributedDataParallel
from asyncpar.testing.world import local_world
from tests.parallel.replicas import (
    accumulate,
    assert_equal_bits,
    assert_same,
    descend,
    gradients_alone,
    make_batch,
    make_model,
    on_all,
    on_all_failing,
    open_replica,
    open_runtime,
    train_step,
    values_of,
)

CONFIGS = {
    "default": DDPConfig(),
    "overlapping": DDPConfig(delay_all_reduce=False),
    "find unused": DDPConfig(find_unused_parameters=True),
    "static": DDPConfig(static_graph=True, gradient_as_bucket_view=True),
}
COUNTS = [(3, 3), (0, 2), (5, 1), (2, 0, 4), (0, 0), (7, 0, 0, 1)]


def train_alone(counts: Sequence[int], *, by_initial_size: bool) -> dict[str, Array]:
    """Return the parameters after the steps of all ranks, each over those that have inputs left."""
    model = make_model()
    for step in range(max(counts)):
        active = [rank for rank, count in enumerate(counts) if step < count]
        every = [gradients_alone(model, *make_batch(2, seed=10 * step + rank)) for rank in active]
        divisor = len(counts) if by_initial_size else len(active)
        for parameter in model.parameters():
            parameter.grad[...] = sum(gradients[parameter.name] for gradients in every) / divisor
        descend(model)
    return values_of(model)


@pytest.mark.parametrize("by_initial_size", [False, True])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
async def test_gradients_are_means_over_the_ranks_that_have_inputs(
    counts: tuple[int, ...], by_initial_size: bool
) -> None:
    async def main(node: Node) -> dict[str, Array]:
        model = make_model(seed=node.rank)
        async with open_replica(node, model) as ddp:
            async with ddp.join(divide_by_initial_world_size=by_initial_size):
                for step in range(counts[node.rank]):
                    await train_step(ddp, *make_batch(2, seed=10 * step + node.rank))
                    await ddp.update(lambda: descend(model))
            return values_of(model)

    async with local_world(len(counts)) as nodes:
        results = await on_all(nodes, main)
    assert_equal_bits(results)
    assert_same(results[0], train_alone(counts, by_initial_size=by_initial_size))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
async def test_every_setting_bears_uneven_inputs(config: DDPConfig) -> None:
    counts = (1, 3, 0)

    async def main(node: Node) -> dict[str, Array]:
        model = make_model()
        async with open_replica(node, model, config=config) as ddp:
            async with ddp.join():
                for step in range(counts[node.rank]):
                    await train_step(ddp, *make_batch(2, seed=10 * step + node.rank))
                    await ddp.update(lambda: descend(model))
            return values_of(model)

    async with local_world(3) as nodes:
        results = await on_all(nodes, main)
    assert_equal_bits(results)
    assert_same(results[0], train_alone(counts, by_initial_size=False))


async def test_shadows_that_update_keep_their_optimizers_equal_and_need_no_parameters() -> None:
    counts = (1, 4)

    async def main(node: Node) -> list[dict[str, Array]]:
        model, after = make_model(), []
        optimizer = Optimizer(model.parameters(), AdamW())

        def step() -> None:
            optimizer.step(0.01)

        async with open_replica(node, model) as ddp:
            for epoch in range(2):  # in the second one, the moments of the first matter
                async with ddp.join(on_shadow=step):
                    for number in range(counts[node.rank - epoch]):
                        await train_step(ddp, *make_batch(2, seed=number + node.rank))
                        await ddp.update(step)
                after.append(values_of(model))
        assert optimizer.step_count == 8
        return after

    async with local_world(2) as nodes:
        first, second = await on_all(nodes, main)
    for values in zip(first, second, strict=True):
        assert_equal_bits(values)


async def test_micro_steps_are_allowed_in_the_block_but_none_may_be_left_over() -> None:
    async def main(node: Node) -> None:
        async with open_replica(node, make_model()) as ddp:
            async with ddp.join():
                for _ in range(node.rank + 1):
                    with ddp.no_sync():
                        await accumulate(ddp, *make_batch(2))
                    await accumulate(ddp, *make_batch(2))
            async with ddp.join():
                if node.rank == 1:
                    with ddp.no_sync():
                        await accumulate(ddp, *make_batch(2))

    async with local_world(2) as nodes:
        other, culprit = await on_all_failing(nodes, main)
    assert isinstance(culprit, UsageError)
    assert "join: 1 backward passes under no_sync were never averaged" in str(culprit)
    assert isinstance(other, PeerCancelled)


@pytest.mark.parametrize("others", [0, 2, 5])
@pytest.mark.parametrize("fails_at", [0, 1, 2])
async def test_a_rank_that_fails_in_the_block_ends_it_everywhere_and_later_blocks_work(
    fails_at: int, others: int
) -> None:
    async def main(node: Node) -> str:
        async with open_replica(node, make_model()) as ddp:
            try:
                async with ddp.join():
                    for step in range(others if node.rank else 4):
                        if node.rank == 0 and step == fails_at:
                            raise ZeroDivisionError
                        await train_step(ddp, *make_batch(2))
            except (ZeroDivisionError, PeerCancelled) as error:
                failure = type(error).__name__
            async with ddp.join():
                for _ in range(node.rank):
                    await train_step(ddp, *make_batch(2))
            return failure

    async with local_world(3) as nodes:
        assert await on_all(nodes, main) == ["ZeroDivisionError", "PeerCancelled", "PeerCancelled"]


async def test_a_rank_that_is_gone_while_others_go_on_is_peer_lost() -> None:
    async def main(node: Node) -> None:
        async with open_runtime(node) as runtime:
            ddp = await DistributedDataParallel(make_model(), "cpu:0", DDP_GROUP, runtime).start()
            try:
                async with ddp.join():
                    for _ in range(2 + node.rank):
                        await train_step(ddp, *make_batch(2))
                        if node.rank == 0:
                            await node.stop()
            finally:
                await ddp.close()

    async with local_world(3) as nodes:
        _, *others = await on_all_failing(nodes, main)
    for error in others:
        assert isinstance(error, PeerLost)
        assert error.rank == 0


async def test_blocks_cannot_be_nested() -> None:
    async with local_world(1) as (node,), open_replica(node, make_model()) as ddp:
        async with ddp.join():
            with pytest.raises(UsageError, match="in such a block already"):
                async with ddp.join():
                    pass
        assert np.isfinite(values_of(ddp)["first/weight"]).all()
