"""Training on several nodes comes to what one process comes to."""

from __future__ import annotations

import io

import numpy as np
import pytest

from asyncpar.errors import NonFiniteValue, UsageError
from asyncpar.multinode import MemoryUsage, MultiNodeTrainer
from asyncpar.nn import Parameter
from asyncpar.nn.optimizers import SGD, Adam
from asyncpar.node import Node
from asyncpar.zero import ZeROStage
from tests.multinode.worlds import (
    RATE,
    RULE,
    TINY_BUCKETS,
    Member,
    Model,
    config_of,
    members,
    node_world,
    on_all,
    train_alone,
)
from tests.products import in_turn, sampled

WORLDS = [(2, 2), (3, 2), (2, 3), (1, 1), (1, 3), (3, 1)]
STAGES = [ZeROStage.NONE, ZeROStage.STAGE1, ZeROStage.STAGE2]


def assert_close(ranks: list[Member], alone: Model, *, tolerance: float = 1e-12) -> None:
    """All ranks have the same bits, those of one process to rounding."""
    expected = alone.values()
    for member in ranks:
        for name, value in member.model.values().items():
            assert np.abs(value - expected[name]).max() <= tolerance, f"{name} on rank {member.rank}"
            assert value.tobytes() == ranks[0].model.values()[name].tobytes(), f"{name} on rank {member.rank}"


@pytest.mark.parametrize(("world", "stage"), in_turn(WORLDS, STAGES))
async def test_all_ranks_train_as_one_process_does(world: tuple[int, int], stage: ZeROStage) -> None:
    async with members(*world, stage=stage, gradient_bucket_size_mb=TINY_BUCKETS) as ranks:
        await on_all(ranks, lambda member: member.train(3))
        assert_close(ranks, train_alone(len(ranks), steps=3))


@pytest.mark.parametrize(("micro_steps", "overlaps", "stage"), sampled([1, 3], [False, True], STAGES))
async def test_micro_steps_weigh_the_same(micro_steps: int, overlaps: bool, stage: ZeROStage) -> None:
    async with members(2, 2, stage=stage, gradient_bucket_size_mb=TINY_BUCKETS) as ranks:
        await on_all(ranks, lambda member: member.train(3, micro_steps=micro_steps, overlaps=overlaps))
        assert_close(ranks, train_alone(4, steps=3, micro_steps=micro_steps))


@pytest.mark.parametrize(("stage", "rule"), in_turn(STAGES, [SGD(momentum=0.9), Adam()]))
async def test_any_rule_will_do(rule: SGD | Adam, stage: ZeROStage) -> None:
    async with members(2, 2, rule=rule, stage=stage) as ranks:
        await on_all(ranks, lambda member: member.train(3))
        assert_close(ranks, train_alone(4, steps=3, rule=rule))


async def test_single_precision_stays_close() -> None:
    async with members(2, 2, dtype="float32") as ranks:
        await on_all(ranks, lambda member: member.train(3))
        assert_close(ranks, train_alone(4, steps=3, dtype="float32"), tolerance=2e-6)


async def test_all_ranks_begin_with_the_values_of_rank_0() -> None:
    async with members(2, 2) as ranks:
        assert_close(ranks, Model(seed=5), tolerance=0.0)


async def test_gradients_are_the_mean_over_the_world_and_zero_after_the_step() -> None:
    async with members(3, 2, seeds=lambda rank: 5) as ranks:

        async def main(member: Member) -> None:
            member.model.backward(0, member.rank, 0)
            member.trainer.update_gradients()
            await member.trainer.synchronize_gradients()
            await member.trainer.apply_gradients()

        await on_all(ranks, main)
        batches = [Model().targets((0, rank, 0)) for rank in range(6)]
        for member in ranks:
            for index, parameter in enumerate(member.model.parameters):
                expected = parameter.value - np.mean([targets[index] for targets in batches], axis=0)
                np.testing.assert_allclose(parameter.grad, expected, rtol=0, atol=1e-12)
        await on_all(ranks, lambda member: member.trainer.optimizer_step(RATE))
        for member in ranks:
            assert all(not gradient.any() for gradient in member.model.gradients().values())


async def test_gradients_may_come_by_name() -> None:
    async with members(2, 1, rule=SGD(), seeds=lambda rank: 5) as ranks:

        async def main(member: Member) -> None:
            trainer = member.trainer
            trainer.update_gradients({"bias": np.full(6, 1.0 + member.rank)})
            trainer.update_gradients({"bias": np.full(6, 1.0), "scale": np.array(8.0)})
            await trainer.synchronize_gradients()
            await trainer.apply_gradients(2)
            await trainer.optimizer_step(1.0)

        before = Model().values()
        await on_all(ranks, main)
        for member in ranks:
            after = member.model.values()
            np.testing.assert_allclose(after["bias"], before["bias"] - 1.25, atol=1e-15)
            np.testing.assert_allclose(after["scale"], before["scale"] - 4.0, atol=1e-15)
            assert (after["weight"] == before["weight"]).all()


@pytest.mark.parametrize("stage", STAGES)
async def test_the_norm_is_that_of_the_mean_and_clips_all_ranks_alike(stage: ZeROStage) -> None:
    async with members(2, 2, rule=SGD(), stage=stage, seeds=lambda rank: 5) as ranks:

        async def main(member: Member) -> float:
            member.model.backward(0, member.rank, 0)
            member.trainer.update_gradients()
            await member.trainer.synchronize_gradients()
            await member.trainer.apply_gradients()
            return await member.trainer.optimizer_step(1.0, clip_norm=0.5)

        before = Model().values()
        norms = await on_all(ranks, main)
    targets = [Model().targets((0, rank, 0)) for rank in range(4)]
    means = [before[name] - np.mean([each[index] for each in targets], axis=0) for index, name in enumerate(before)]
    norm = np.sqrt(sum(float((mean**2).sum()) for mean in means))
    np.testing.assert_allclose(norms, norm, rtol=1e-12)
    assert len(set(norms)) == 1
    for member in ranks:
        for mean, (name, value) in zip(means, member.model.values().items(), strict=True):
            np.testing.assert_allclose(value, before[name] - 0.5 / norm * mean, atol=1e-12)


async def test_a_gradient_that_is_not_finite_ends_the_step_on_all_ranks_and_changes_nothing() -> None:
    async with members(2, 2, seeds=lambda rank: 5) as ranks:

        async def main(member: Member) -> str:
            member.model.backward(0, member.rank, 0)
            if member.rank == 2:
                member.model.parameters[1].grad[3, 3] = np.inf
            member.trainer.update_gradients()
            with pytest.raises(NonFiniteValue, match="rank 2 has NaN or infinity in weight"):
                await member.trainer.synchronize_gradients()
            return "refused"

        assert await on_all(ranks, main) == ["refused"] * 4
        await on_all(ranks, lambda member: member.step(0))
        assert_close(ranks, train_alone(4, steps=1))


# -- compression -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
async def test_compressed_gradients_leave_all_ranks_equal_and_close_to_one_process(stage: ZeROStage) -> None:
    rule = SGD()
    async with members(2, 2, rule=rule, stage=stage, gradient_compression=True, dtype="float32") as ranks:
        await on_all(ranks, lambda member: member.train(8))
        assert_close(ranks, train_alone(4, steps=8, rule=rule, dtype="float32"), tolerance=0.01)
        info = [member.trainer.get_training_stats().compression for member in ranks]
    assert [one.compressed_size == 0 for one in info] == [False, True, False, True]
    assert 2.0 < info[0].compression_ratio < 4.0
    assert info[0].original_size / info[0].compressed_size == info[0].compression_ratio
    assert info[1].compression_ratio == 1.0


@pytest.mark.parametrize("stage", STAGES)
async def test_inside_one_node_nothing_is_compressed(stage: ZeROStage) -> None:
    async with members(1, 3, stage=stage, gradient_compression=True) as ranks:
        await on_all(ranks, lambda member: member.step(0))
        assert_close(ranks, train_alone(3, steps=1))


# -- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "expected"), [(0, 16.0), (1, 8 + 8 / 4), (2, 4 + 12 / 4)])
async def test_memory_is_what_the_formulas_say(stage: int, expected: float) -> None:
    async with members(2, 2, rule=Adam(), stage=ZeROStage.of(stage), dtype="float32") as ranks:

        async def main(member: Member) -> MemoryUsage:
            member.model.backward(0, member.rank, 0)
            member.trainer.update_gradients()
            await member.trainer.synchronize_gradients()
            await member.trainer.apply_gradients()
            return member.trainer.get_memory_usage()

        usages = await on_all(ranks, main)
    values = sum(parameter.size for parameter in ranks[0].model.parameters)
    kept = [usage.total - usage.buffers for usage in usages]
    assert sum(kept) / len(kept) == pytest.approx(expected * values, rel=1e-12)


async def test_sums_over_micro_steps_take_memory_until_they_are_applied() -> None:
    async with members(1, 1, dtype="float32") as [member]:
        held = [member.trainer.get_memory_usage().accumulation]
        member.model.backward(0, 0, 0)
        member.trainer.update_gradients()
        held.append(member.trainer.get_memory_usage().accumulation)
        await member.trainer.synchronize_gradients()
        await member.trainer.apply_gradients()
        held.append(member.trainer.get_memory_usage().accumulation)
        values = sum(parameter.size for parameter in member.model.parameters)
    assert held == [0, 4 * values, 0]


async def test_statistics_tell_what_was_done() -> None:
    async with members(2, 2, gradient_bucket_size_mb=TINY_BUCKETS) as ranks:
        await on_all(ranks, lambda member: member.train(2, micro_steps=3))
        stats = [member.trainer.get_training_stats() for member in ranks]
    assert [(one.node_rank, one.local_rank, one.global_rank) for one in stats] == [
        (0, 0, 0),
        (0, 1, 1),
        (1, 0, 2),
        (1, 1, 3),
    ]
    for one in stats:
        assert (one.world_size, one.steps, one.micro_steps, one.parameter_count) == (4, 2, 6, 108)
        assert one.synchronization.total_sync_operations == 2
        assert one.synchronization.total_buckets_synced == 2 * 3


@pytest.mark.parametrize("world", [(2, 2), (1, 3)])
async def test_statistics_of_sharded_training_count_buckets_and_time(world: tuple[int, int]) -> None:
    async with members(*world, stage=ZeROStage.STAGE2, gradient_bucket_size_mb=TINY_BUCKETS) as ranks:
        await on_all(ranks, lambda member: member.train(2, overlaps=True))
        stats = [member.trainer.get_training_stats().synchronization for member in ranks]
    for one in stats:
        assert (one.total_sync_operations, one.total_buckets_synced) == (2, 2 * 3)
        assert 0.0 < one.total_sync_time <= one.total_bucket_sync_time
        assert 0.0 <= one.overlap_fraction <= 1.0
        assert one.bytes_on_wire > 0


@pytest.mark.parametrize(("stage", "saved"), [(0, (0.0, 0.0)), (1, (0.4, 0.75)), (2, (0.4, 0.75))])
async def test_statistics_tell_settings_and_measured_savings(stage: int, saved: tuple[float, float]) -> None:
    is_compressed = stage == 1
    async with members(2, 2, stage=ZeROStage.of(stage), gradient_compression=is_compressed) as ranks:
        await on_all(ranks, lambda member: member.step(0))
        for member in ranks:
            stats = member.trainer.get_training_stats()
            assert (stats.zero_stage, stats.communication_backend) == (ZeROStage.of(stage), "native")
            assert stats.gradient_compression_enabled is is_compressed
            assert saved[0] <= stats.memory_savings <= saved[1]
            parts = stats.memory_savings
            assert (parts["gradient"] > 0.5, parts["optimizer"] > 0.5) == (stage >= 2, stage >= 1)
            assert (parts["parameter"], parts["communication"] <= 0.0) == (0.0, True)
            usage = member.trainer.get_memory_usage()
            assert sum(usage.components.values()) == usage["total"] == usage.total


async def test_statistics_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    async with members(1, 2) as ranks:
        await on_all(ranks, lambda member: member.step(0))
        stats = ranks[1].trainer.get_training_stats()
    stream = io.StringIO()
    stats.print_stats(stream)
    stats.print_stats()
    assert stream.getvalue() == capsys.readouterr().out == f"{stats}\n"
    assert "rank 1 of 2" in str(stats)
    assert max(map(len, str(stats).splitlines())) <= 80


@pytest.mark.parametrize(("stage", "expected"), [(0, [True, False, False]), (1, [True, True, True])])
async def test_ranks_save_what_no_rank_before_them_has(stage: int, expected: list[bool]) -> None:
    async with members(3, 1, stage=ZeROStage.of(stage)) as ranks:
        assert [member.trainer.should_save_checkpoint() for member in ranks] == expected


async def test_a_rank_that_owns_nothing_saves_nothing() -> None:
    async with node_world(1, 4) as nodes:

        async def main(node: Node) -> bool:
            config = config_of(node.rank, 1, 4, stage=ZeROStage.STAGE1)
            async with MultiNodeTrainer(config, RULE, communicator=node.world) as trainer:
                await trainer.register_parameters([Parameter("weight", np.ones(3))])
                return trainer.should_save_checkpoint()

        assert await on_all(nodes, main) == [True, True, True, False]


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("is_applied", [True, False])
async def test_a_step_synchronizes_where_nothing_was_synchronized(stage: int, is_applied: bool) -> None:
    async def step(member: Member) -> None:
        for micro in range(2):
            member.model.backward(0, member.rank, micro)
            member.trainer.update_gradients()
        if is_applied:
            await member.trainer.apply_gradients(2)
        await member.trainer.optimizer_step(RATE)

    async def step_without_gradients(member: Member) -> None:
        with pytest.raises(UsageError, match="expected gradients of at least one micro-step"):
            await member.trainer.optimizer_step(RATE)

    async with members(2, 2, stage=ZeROStage.of(stage)) as ranks:
        await on_all(ranks, step)
        assert_close(ranks, train_alone(4, steps=1, micro_steps=2))
        await on_all(ranks, step_without_gradients)
