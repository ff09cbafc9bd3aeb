"""Training goes on from a checkpoint, on any number of nodes and in any stage, as if nothing had happened."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncpar.errors import CheckpointError, UsageError
from asyncpar.multinode import MultiNodeTrainer
from asyncpar.nn import Parameter
from asyncpar.zero import ZeROStage
from tests.multinode.worlds import RULE, Member, Model, config_of, members, node_world, on_all, on_all_failing
from tests.products import in_turn

NONE, STAGE1, STAGE2 = ZeROStage.NONE, ZeROStage.STAGE1, ZeROStage.STAGE2


async def train_the_same(member: Member, *, first: int, steps: int) -> None:
    """Train on batches of which all ranks have the same, so that their number does not matter."""
    trainer, model = member.trainer, member.model
    for step in range(first, first + steps):
        model.backward(step, 0, 0)
        trainer.update_gradients()
        await trainer.synchronize_gradients()
        await trainer.apply_gradients()
        await trainer.optimizer_step(0.05)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, 2, NONE), (2, 2, NONE)),
        ((2, 2, NONE), (3, 1, STAGE2)),
        ((3, 2, STAGE2), (1, 2, NONE)),
        ((2, 1, STAGE1), (1, 3, STAGE2)),
        ((1, 1, STAGE2), (2, 2, STAGE1)),
    ],
)
async def test_training_goes_on_at_any_other_layout(
    before: tuple[int, int, ZeROStage], after: tuple[int, int, ZeROStage], tmp_path: Path
) -> None:
    async with members(*before[:2], stage=before[2]) as ranks:
        await on_all(ranks, lambda member: train_the_same(member, first=0, steps=2))
        saved = await on_all(ranks, lambda member: member.trainer.save_checkpoint(tmp_path, extra={"epoch": 7}))
        assert len(set(saved)) == 1
        await on_all(ranks, lambda member: train_the_same(member, first=2, steps=2))
        expected = ranks[0].model.values()
    async with members(*after[:2], stage=after[2]) as ranks:
        assert await on_all(ranks, lambda member: member.trainer.load_checkpoint(tmp_path)) == [{"epoch": 7}] * len(
            ranks
        )
        assert ranks[0].trainer.get_training_stats().steps == 2
        await on_all(ranks, lambda member: train_the_same(member, first=2, steps=2))
        for member in ranks:
            for name, value in member.model.values().items():
                np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-12)


async def test_a_checkpoint_can_be_saved_after_a_step_that_failed(tmp_path: Path) -> None:
    async with members(1, 2, stage=STAGE2) as ranks:

        async def fail(member: Member) -> None:
            async with member.trainer.synchronization():
                raise RuntimeError

        await on_all_failing(ranks, fail)
        await on_all(ranks, lambda member: member.trainer.save_checkpoint(tmp_path))
        await on_all(ranks, lambda member: member.trainer.load_checkpoint(tmp_path))
        await on_all(ranks, lambda member: train_the_same(member, first=0, steps=1))


async def test_only_the_last_checkpoints_are_kept_if_so_asked(tmp_path: Path) -> None:
    async with members(1, 2) as ranks:

        async def main(member: Member) -> None:
            for step in range(3):
                await member.trainer.save_checkpoint(tmp_path, keep=2)
                await train_the_same(member, first=step, steps=1)

        await on_all(ranks, main)
    assert len(list(tmp_path.glob("step_*"))) == 2


async def test_nothing_is_saved_or_loaded_in_the_middle_of_a_step(tmp_path: Path) -> None:
    async with members(1, 1) as [member]:
        member.model.backward(0, 0, 0)
        member.trainer.update_gradients()
        with pytest.raises(UsageError, match="save_checkpoint: expected no gradients, got those of 1 micro-steps"):
            await member.trainer.save_checkpoint(tmp_path)
        await member.trainer.synchronize_gradients()
        with pytest.raises(UsageError, match="load_checkpoint: expected apply_gradients or optimizer_step next"):
            await member.trainer.load_checkpoint(tmp_path)


async def test_a_checkpoint_of_another_model_is_refused_on_every_rank(tmp_path: Path) -> None:
    async with members(1, 2) as ranks:
        await on_all(ranks, lambda member: member.trainer.save_checkpoint(tmp_path))
    async with node_world(1, 2) as nodes:

        async def main(rank: int) -> None:
            trainer = MultiNodeTrainer(config_of(rank, 1, 2), RULE, communicator=nodes[rank].world)
            async with trainer:
                await trainer.register_parameters([*Model().parameters, Parameter("more", np.ones(3))])
                await trainer.load_checkpoint(tmp_path)

        assert all(isinstance(error, CheckpointError) for error in await on_all_failing([0, 1], main))


async def two_more_steps(member: Member) -> None:
    for step in (3, 4):
        await member.step(step)


@pytest.mark.parametrize(("stage", "nodes"), in_turn([NONE, STAGE1, STAGE2], [(2, 2), (3, 1)]))
async def test_residuals_are_saved_so_that_the_same_layout_goes_on_to_the_same_bits(
    stage: ZeROStage, nodes: tuple[int, int], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"stage": stage, "gradient_compression": True, "dtype": "float32"}
    async with members(*nodes, **settings) as ranks:
        await on_all(ranks, lambda member: member.train(3))
        await on_all(ranks, lambda member: member.trainer.save_checkpoint(tmp_path))
        await on_all(ranks, two_more_steps)
        expected = ranks[0].model.values()
    async with members(*nodes, **settings) as ranks:
        await on_all(ranks, lambda member: member.trainer.load_checkpoint(tmp_path))
        await on_all(ranks, two_more_steps)
        for member in ranks:
            for name, value in member.model.values().items():
                np.testing.assert_array_equal(value, expected[name])


def lacking_of(ranks: list[Member]) -> dict[str, Any]:
    """Return what sums over all ranks lack, by parameter."""
    total: dict[str, Any] = {}
    for member in ranks:
        state = member.trainer._known("test").flow.inner.reduction_state()  # noqa: SLF001
        for key, (name, weight) in state.parts.items():
            total[name] = total.get(name, 0.0) + state.arrays[key].astype(np.float64) * weight
    return total


@pytest.mark.parametrize(
    ("before", "after", "nodes"), [(STAGE1, STAGE1, (2, 1)), (STAGE2, NONE, (3, 1)), (NONE, STAGE1, (3, 1))]
)
async def test_other_nodes_and_stages_make_up_for_what_gradients_lack(
    before: ZeROStage, after: ZeROStage, nodes: tuple[int, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with members(2, 2, stage=before, gradient_compression=True, dtype="float32") as ranks:
        await on_all(ranks, lambda member: member.train(2))
        await on_all(ranks, lambda member: member.trainer.save_checkpoint(tmp_path))
        expected = lacking_of(ranks)
    with caplog.at_level(logging.WARNING, "asyncpar"):
        async with members(*nodes, stage=after, gradient_compression=True, dtype="float32") as ranks:
            await on_all(ranks, lambda member: member.trainer.load_checkpoint(tmp_path))
            got = lacking_of(ranks)
            await on_all(ranks, lambda member: member.step(2))
    assert got.keys() == expected.keys()
    assert any(values.any() for values in expected.values())
    for name, values in expected.items():
        np.testing.assert_allclose(got[name], values, rtol=1e-5, atol=1e-6 * np.abs(values).max(), err_msg=name)
    assert not [record for record in caplog.records if "dropped" in record.getMessage()]


@pytest.mark.parametrize(("before", "after"), [(NONE, STAGE2), (STAGE1, NONE)])
async def test_training_goes_on_with_how_long_parameters_were_frozen(
    before: ZeROStage, after: ZeROStage, tmp_path: Path
) -> None:
    async def train(member: Member, first: int, steps: int, *, is_frozen: bool) -> None:
        member.model.parameters[1].requires_grad = not is_frozen
        await train_the_same(member, first=first, steps=steps)

    async with members(2, 1, stage=before) as ranks:
        await on_all(ranks, lambda member: train(member, 0, 2, is_frozen=True))
        await on_all(ranks, lambda member: member.trainer.save_checkpoint(tmp_path))
        await on_all(ranks, lambda member: train(member, 2, 2, is_frozen=False))
        expected = ranks[0].model.values()
    async with members(1, 2, stage=after) as ranks:
        await on_all(ranks, lambda member: member.trainer.load_checkpoint(tmp_path))
        await on_all(ranks, lambda member: train(member, 2, 2, is_frozen=False))
        for name, value in ranks[0].model.values().items():
            np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-12)
