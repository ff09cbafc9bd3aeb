"""Replicas on ranks learn what one process learns from the whole batch, or all raise."""

from __future__ import annotations

import threading
from typing import Any, Literal

import numpy as np
import pytest

from asyncpar.errors import UsageError
from asyncpar.gradsync import GradientCompressionConfig
from asyncpar.nn import Array
from asyncpar.nn.optimizers import AdamW, Optimizer
from asyncpar.node import Node
from asyncpar.parallel import DDP_GROUP, DDPConfig, OnGradient
from asyncpar.testing.world import local_world
from tests.parallel.replicas import (
    CONFIGS,
    Branches,
    accumulate,
    assert_equal_bits,
    assert_same,
    descend,
    gradients_alone,
    gradients_of,
    loss_gradient,
    make_batch,
    make_model,
    on_all,
    open_replica,
    train_step,
    values_of,
)
from tests.products import in_turn


@pytest.mark.parametrize(("name", "size"), in_turn(CONFIGS, [2, 3, 1]))
async def test_training_is_that_of_one_process_on_the_whole_batch(name: str, size: int) -> None:
    config = CONFIGS[name]
    steps, rows = 4, 2

    async def main(node: Node) -> dict[str, Array]:
        model = make_model(seed=node.rank)  # rank 0's values count
        async with open_replica(node, model, config=config, bucket_size=200) as ddp:
            optimizer = Optimizer(model.parameters(), AdamW())
            for step in range(steps):
                x, target = make_batch(rows * size, seed=step)
                mine = slice(node.rank * rows, (node.rank + 1) * rows)
                await train_step(ddp, x[mine], target[mine])
                await ddp.update(lambda: optimizer.step(0.01))
            return values_of(model)

    async with local_world(size) as nodes:
        results = await on_all(nodes, main)
    alone = make_model(seed=0)
    optimizer = Optimizer(alone.parameters(), AdamW())
    for step in range(steps):
        gradients_alone(alone, *make_batch(rows * size, seed=step))
        optimizer.step(0.01)
    assert_same(results[0], values_of(alone))
    assert_equal_bits(results)


async def test_the_input_gradient_is_that_of_the_own_rows() -> None:
    async def main(node: Node) -> Array | None:
        async with open_replica(node, make_model()) as ddp:
            x, target = make_batch(2, seed=node.rank)
            y, saved = await ddp.forward(x)
            return await ddp.backward(saved, loss_gradient(y, target))

    async with local_world(2) as nodes:
        results = await on_all(nodes, main)
    for rank, dx in enumerate(results):
        model, (x, target) = make_model(), make_batch(2, seed=rank)
        y, saved = model.forward(x)
        np.testing.assert_allclose(dx, model.backward(saved, loss_gradient(y, target)), rtol=1e-12)  # type: ignore[arg-type]


async def test_a_replica_says_where_it_is() -> None:
    async def main(node: Node) -> tuple[str, int, int, int]:
        async with open_replica(node, make_model()) as ddp:
            assert ddp.parameters()
            return str(ddp.process_group()), ddp.rank(), ddp.local_rank(), ddp.world_size()

    async with local_world(3, hosts=["a", "b", "b"]) as nodes:
        assert await on_all(nodes, main) == [(DDP_GROUP, 0, 0, 3), (DDP_GROUP, 1, 0, 3), (DDP_GROUP, 2, 1, 3)]


async def test_plain_descent_needs_no_update_call() -> None:
    async def main(node: Node) -> dict[str, Array]:
        model = make_model()
        async with open_replica(node, model) as ddp:
            for step in range(3):
                await train_step(ddp, *make_batch(2, seed=step + node.rank))
                descend(model)
            return values_of(model)

    async with local_world(2) as nodes:
        assert_equal_bits(await on_all(nodes, main))


# -- settings ---------------------------------------------------------------------------------------------------------


async def test_buckets_can_be_resized_between_steps() -> None:
    async def main(node: Node) -> tuple[int, int]:
        async with open_replica(node, make_model()) as ddp:
            assert ddp.bucket_size == 25 << 20
            await train_step(ddp, *make_batch(2))
            one = ddp.get_sync_stats().total_buckets_synced
            ddp.set_bucket_size(300)
            await train_step(ddp, *make_batch(2))
            with pytest.raises(UsageError, match="bucket_size"):
                ddp.set_bucket_size(-1)
            return one, ddp.get_sync_stats().total_buckets_synced

    async with local_world(2) as nodes:
        for one, more in await on_all(nodes, main):
            assert one == 1
            assert more >= 3


async def test_another_bucket_size_on_one_rank_is_an_error_on_all_and_can_be_mended() -> None:
    async def main(node: Node) -> dict[str, Array]:
        model = make_model()
        async with open_replica(node, model) as ddp:
            await train_step(ddp, *make_batch(2))
            for _ in range(2):
                if node.rank == 1:
                    ddp.set_bucket_size(300)
                with pytest.raises(UsageError, match="bucket_size_mb=25"):
                    await train_step(ddp, *make_batch(2))
                ddp.set_bucket_size(25 << 20)
                await train_step(ddp, *make_batch(2, seed=node.rank))
            return gradients_of(model)

    async with local_world(2) as nodes:
        assert_equal_bits(await on_all(nodes, main))


class Watchful(Branches):
    """Between its two gradients it looks whether, or waits until, its first one travels."""

    def __init__(self, *, waits: bool) -> None:
        super().__init__("a", "b")
        self.waits = waits
        self.travels = threading.Event()
        self.has_seen = False

    def backward(self, saved: Any, dy: Array, on_gradient: OnGradient | None = None) -> Array | None:
        def watch(name: str) -> None:
            assert on_gradient is not None
            on_gradient(name)
            if name == "a":
                self.has_seen = self.travels.wait(5.0) if self.waits else self.travels.is_set()

        return super().backward(saved, dy, watch)


@pytest.mark.parametrize("delayed", [True, False])
async def test_without_delay_gradients_travel_while_others_are_computed(
    delayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(node: Node) -> bool:
        model = Watchful(waits=not delayed)
        reduce = node.world.all_reduce

        def observe(x: Array, *arguments: Any, **options: Any) -> Any:
            model.travels.set()
            return reduce(x, *arguments, **options)

        monkeypatch.setattr(node.world, "all_reduce", observe)
        config = DDPConfig(delay_all_reduce=delayed)
        async with open_replica(node, model, config=config, bucket_size=1) as ddp:
            await train_step(ddp, *make_batch(2))
        return model.has_seen

    async with local_world(2) as nodes:
        assert await on_all(nodes, main) == [not delayed] * 2


async def test_compression_goes_through() -> None:
    async def main(node: Node) -> dict[str, Array]:
        model = make_model()
        compression = GradientCompressionConfig(codec="int8")
        async with open_replica(node, model, compression=compression) as ddp:
            await train_step(ddp, *make_batch(2, seed=node.rank))
            return gradients_of(model)

    async with local_world(2) as nodes:
        results = await on_all(nodes, main)
    assert_equal_bits(results)
    model = make_model()
    every = [gradients_alone(model, *make_batch(2, seed=rank)) for rank in range(2)]
    expected = {name: (every[0][name] + every[1][name]) / 2 for name in every[0]}
    scale = max(np.abs(gradient).max() for gradient in expected.values())
    assert_same(results[0], expected, tolerance=0.05 * scale)
    assert any((results[0][name] != expected[name]).any() for name in expected)


# -- micro-steps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [CONFIGS["default"], CONFIGS["overlapping"], CONFIGS["overlapping views"]])
@pytest.mark.parametrize("micro_steps", [1, 2, 4])
async def test_micro_steps_weigh_equally(micro_steps: int, config: DDPConfig) -> None:
    rows = 3

    async def main(node: Node) -> tuple[dict[str, Array], int]:
        model = make_model()
        async with open_replica(node, model, config=config) as ddp:
            for _ in range(2):
                ddp.zero_grad()
                x, target = make_batch(2 * rows * micro_steps)
                chunks = np.split(np.arange(len(x)), 2 * micro_steps)[node.rank :: 2]
                with ddp.no_sync():
                    for chunk in chunks[:-1]:
                        await accumulate(ddp, x[chunk], target[chunk])
                await accumulate(ddp, x[chunks[-1]], target[chunks[-1]])
            return gradients_of(model), ddp.get_sync_stats().total_sync_operations

    async with local_world(2) as nodes:
        results = await on_all(nodes, main)
    expected = gradients_alone(make_model(), *make_batch(2 * rows * micro_steps))
    for gradients, operations in results:
        assert_same(gradients, expected)
        assert operations == 2


@pytest.mark.parametrize(("weight", "total"), [("mean", 1.0), ("sum", 4.0)])
async def test_equal_gradients_of_many_micro_steps_weigh_as_the_configuration_says(
    weight: Literal["mean", "sum"], total: float
) -> None:
    async def main(node: Node) -> dict[str, Array]:
        model = make_model()
        async with open_replica(node, model, config=DDPConfig(no_sync_weight=weight)) as ddp:
            with ddp.no_sync():
                for _ in range(3):
                    await accumulate(ddp, *make_batch(2))
            await accumulate(ddp, *make_batch(2))
            return gradients_of(model)

    async with local_world(2) as nodes:
        for gradients in await on_all(nodes, main):
            alone = gradients_alone(make_model(), *make_batch(2))
            assert_same(gradients, {name: total * gradient for name, gradient in alone.items()})


async def test_ranks_that_weigh_passes_differently_are_refused() -> None:
    async def main(node: Node) -> None:
        with pytest.raises(UsageError, match="no_sync_weight"):
            async with open_replica(
                node, make_model(), config=DDPConfig(no_sync_weight="sum" if node.rank else "mean")
            ):
                pass

    async with local_world(2) as nodes:
        await on_all(nodes, main)
    with pytest.raises(UsageError, match='no_sync_weight: expected "mean" or "sum", got \'none\''):
        DDPConfig(no_sync_weight="none")  # type: ignore[arg-type]


async def test_nothing_is_sent_in_no_sync_and_in_evaluation() -> None:
    async def main(node: Node) -> None:
        async with open_replica(node, make_model()) as ddp:
            before = node.world.traffic
            with ddp.no_sync():
                await accumulate(ddp, *make_batch(2))
            ddp.set_training(False)
            y, saved = await ddp.forward(make_batch(2)[0])
            with pytest.raises(UsageError, match="set to evaluation"):
                await ddp.backward(saved, y)
            assert node.world.traffic == before

    async with local_world(2) as nodes:
        await on_all(nodes, main)


@pytest.mark.parametrize("micro_steps", [1, 3])
async def test_pending_micro_steps_can_be_averaged_without_another_pass(micro_steps: int) -> None:
    rows = 2

    async def main(node: Node) -> tuple[dict[str, Array], int]:
        model = make_model()
        x, target = make_batch(2 * rows * micro_steps)
        chunks = np.split(np.arange(len(x)), 2 * micro_steps)[node.rank :: 2]
        async with open_replica(node, model) as ddp:
            await ddp.sync_gradients()  # nothing waits for it
            with ddp.no_sync():
                for chunk in chunks:
                    await accumulate(ddp, x[chunk], target[chunk])
            ddp.set_training(False)
            await ddp.sync_gradients()
            ddp.set_training(True)
            await ddp.sync_gradients()
            await ddp.sync_gradients()  # once
            return gradients_of(model), ddp.get_sync_stats().total_sync_operations

    async with local_world(2) as nodes:
        results = await on_all(nodes, main)
    expected = gradients_alone(make_model(), *make_batch(2 * rows * micro_steps))
    for gradients, operations in results:
        assert_same(gradients, expected)
        assert operations == 1
    assert_equal_bits([gradients for gradients, _ in results])


async def test_passes_that_only_some_ranks_have_had_are_refused_on_all_and_nothing_is_mixed() -> None:
    async def main(node: Node) -> None:
        async with open_replica(node, make_model()) as ddp:
            if node.rank:
                with ddp.no_sync():
                    await accumulate(ddp, *make_batch(2))
            has = "has such" if node.rank else "has no such"
            with pytest.raises(UsageError, match=f"on all ranks or on none, but this rank {has} passes"):
                await ddp.sync_gradients()
            await train_step(ddp, *make_batch(2))
            assert_same(gradients_of(ddp), gradients_alone(make_model(), *make_batch(2)))

    async with local_world(2) as nodes:
        await on_all(nodes, main)
