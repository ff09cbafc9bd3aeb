"""A coordinator goes on with another configuration where it was, or reports on all ranks why it cannot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.parallel import CommunicationStrategy, MemoryOptimizationStrategy, PipelineScheduleType
from asyncpar.errors import UsageError
from asyncpar.gradsync import GradientBucketingConfig, GradientCompressionConfig
from asyncpar.hybrid import HybridConfig, ThreeDParallelismCoordinator, TransformerModel
from asyncpar.nn import TransformerConfig
from asyncpar.nn.optimizers import SGD, AdamW
from asyncpar.zero import ZeROConfig, ZeROStage
from tests.hybrid.worlds import TINY, Outcome, gather, make_config, on_ranks, train_alone, train_step
from tests.soak import chosen

ROWS = 8


async def train_with(first: HybridConfig, second: Any, *, steps: int = 2, model: TransformerConfig = TINY) -> Outcome:
    """Train ``steps`` steps with each configuration, by one coordinator."""

    async def main(world: Communicator) -> Any:
        made = await ThreeDParallelismCoordinator.create(first, TransformerModel(config=model), world)
        async with made as coordinator:
            results = [await train_step(coordinator, model, step, rows=ROWS) for step in range(steps)]
            await coordinator.update_config(second)
            assert coordinator.steps == steps
            results += [await train_step(coordinator, model, steps + step, rows=ROWS) for step in range(steps)]
            assert len(coordinator.monitor.measures) == 2 * steps
            return results, [replace(piece, array=piece.array.copy()) for piece in coordinator.pieces()]

    every = await on_ranks(first.parallelism.world_size, main)
    results = every[0][0]
    return Outcome(
        losses=[result.loss for result in results],
        norms=[result.gradient_norm for result in results],
        tensors=gather([pieces for _, pieces in every]),
    )


def assert_same(one: Outcome, other: Outcome) -> None:
    np.testing.assert_allclose(one.losses, other.losses, rtol=1e-12)
    for key, values in other.tensors.items():
        np.testing.assert_allclose(one.tensors[key], values, rtol=1e-10, atol=1e-12, err_msg=str(key))


NUMBERS_STAY = {
    "micro-batches": {"micro_batches": 2},
    "schedule": {"pipeline_schedule": PipelineScheduleType.GPIPE, "micro_batches": 4},
    "recomputation": {"memory_strategy": MemoryOptimizationStrategy.AGGRESSIVE},
    "buckets": {"bucketing": GradientBucketingConfig(bucket_size_mb=0.001, overlap_communication=False)},
    "strategy": {"comm_strategy": CommunicationStrategy.RING_ALL_REDUCE},
}


@pytest.mark.parametrize("change", NUMBERS_STAY.values(), ids=NUMBERS_STAY.keys())
async def test_what_changes_no_numbers_goes_on_as_before(change: dict[str, Any]) -> None:
    """Stages have two layers each, of which some are recomputed."""
    model, steps = replace(TINY, layers=4), chosen(1, soak=2)
    replicas = 2 if change.keys() & {"bucketing", "comm_strategy"} else chosen(1, soak=2)
    first, second = (make_config(replicas, 1, 2, layers=4, **more) for more in ({}, change))
    together = await train_with(first, second, steps=steps, model=model)
    assert_same(together, train_alone(model, first, rows=ROWS, steps=2 * steps))


@pytest.mark.parametrize("stage", [ZeROStage.STAGE1, ZeROStage.STAGE3])
async def test_sharded_states_go_over(stage: ZeROStage) -> None:
    first = make_config(3, zero=ZeROConfig(stage=stage))
    depth = 0 if stage.shards_parameters else 2
    second = make_config(3, zero=ZeROConfig(stage=stage, bucket_size_mb=0.001, prefetch_depth=depth))
    rows = 9

    async def main(world: Communicator) -> list[float]:
        async with await ThreeDParallelismCoordinator.create(first, TransformerModel(config=TINY), world) as one:
            before = (await train_step(one, TINY, 0, rows=rows)).loss
            await one.update_config(second)
            return [before, (await train_step(one, TINY, 1, rows=rows)).loss]

    for losses in await on_ranks(3, main):
        np.testing.assert_allclose(losses, train_alone(TINY, first, rows=rows).losses, rtol=1e-12)


async def test_the_settings_of_the_layout_alone_can_be_given() -> None:
    first = make_config(2, clip_norm=0.5)
    second = replace(first.parallelism, memory_strategy=MemoryOptimizationStrategy.EXTREME)
    assert_same(await train_with(first, second), train_alone(TINY, first, rows=ROWS, steps=4))


async def test_a_new_rule_and_clip_norm_are_in_force() -> None:
    first, second = make_config(2, rule=AdamW(weight_decay=0.0)), make_config(2, rule=SGD(), clip_norm=0.1)
    alone = train_alone(TINY, first, rows=ROWS, steps=4)
    together = await train_with(first, second)
    assert together.losses[:3] == pytest.approx(alone.losses[:3], rel=1e-12)
    assert together.losses[3] != pytest.approx(alone.losses[3], rel=1e-6)
    assert {kind for _, kind in together.tensors} == {"value"}


MOVES = {
    "axes": make_config(1, 2, 1),
    "sharding": make_config(2, 1, 1, zero=ZeROConfig(stage=ZeROStage.STAGE1)),
}


@pytest.mark.parametrize("second", MOVES.values(), ids=MOVES.keys())
async def test_what_would_move_parameters_is_refused_on_all_ranks_and_nothing_is_changed(second: HybridConfig) -> None:
    first = make_config(2, 1, 1)

    async def main(world: Communicator) -> list[float]:
        async with await ThreeDParallelismCoordinator.create(first, TransformerModel(config=TINY), world) as one:
            losses = [(await train_step(one, TINY, 0, rows=ROWS)).loss]
            for _ in range(2):
                with pytest.raises(UsageError, match="config: expected one in which every rank has what it has now"):
                    await one.update_config(second)
            assert one.config == first
            return [*losses, (await train_step(one, TINY, 1, rows=ROWS)).loss]

    for losses in await on_ranks(2, main):
        np.testing.assert_allclose(losses, train_alone(TINY, first, rows=ROWS).losses, rtol=1e-12)


async def test_a_rule_that_needs_states_which_there_are_not_is_refused() -> None:
    async def main(world: Communicator) -> None:
        config = make_config(2, rule=SGD())
        async with await ThreeDParallelismCoordinator.create(config, TransformerModel(config=TINY), world) as one:
            with pytest.raises(UsageError, match=r"rank 0 would need another part of .*, or has none"):
                await one.update_config(make_config(2, rule=AdamW()))
            await train_step(one, TINY, 0, rows=ROWS)

    await on_ranks(2, main)


async def test_configurations_that_differ_or_do_not_fit_are_refused_on_all_ranks() -> None:
    async def main(world: Communicator) -> None:
        config = make_config(2)
        async with await ThreeDParallelismCoordinator.create(config, TransformerModel(config=TINY), world) as one:
            for wrong in (make_config(2, clip_norm=1.0 + world.rank), make_config(3)):
                with pytest.raises(UsageError):
                    await one.update_config(wrong)
            await train_step(one, TINY, 0, rows=ROWS)

    await on_ranks(2, main)


@pytest.mark.parametrize("stage", [ZeROStage.NONE, ZeROStage.STAGE2])
async def test_residuals_go_over_where_gradients_are_reduced_as_before(stage: ZeROStage) -> None:
    model = replace(TINY, dtype="float32")
    compression = GradientCompressionConfig(codec="int8" if stage is ZeROStage.NONE else None)
    zero = ZeROConfig(stage=stage, gradient_compression=stage is not ZeROStage.NONE)
    first = make_config(2, compression=compression, zero=zero)

    async def train(world: Communicator, *, updates: bool) -> list[float]:
        losses = []
        async with await ThreeDParallelismCoordinator.create(first, TransformerModel(config=model), world) as one:
            for step in range(4):
                if updates and step == 2:
                    await one.update_config(replace(first, clip_norm=1e9))
                losses.append((await train_step(one, model, step, rows=ROWS)).loss)
        return losses

    expected = await on_ranks(2, lambda world: train(world, updates=False))
    assert await on_ranks(2, lambda world: train(world, updates=True)) == expected
