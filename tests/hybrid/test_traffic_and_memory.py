"""Traffic of a step and memory of a rank are those of the formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.parallel import MemoryOptimizationStrategy
from asyncpar.hybrid import Precision
from asyncpar.zero import ZeROConfig, ZeROStage
from tests.hybrid.ranks import ROWS, Ranks, outcomes_of, running
from tests.hybrid.worlds import TINY, make_config
from tests.products import sampled

MODEL = replace(TINY, layers=2, heads=4, vocabulary=16, length=8, dtype="float32")
BYTES = 4
AGREEMENT = 4 * 8
"""Bytes by which replicas agree on a step of ZeRO."""


def sent_by(communicator: Communicator, operations: Sequence[str]) -> int:
    return sum(one.payload_bytes for one in communicator.traffic.operations if one.operation in operations)


async def one_step(ranks: Ranks, axis: str, *operations: str) -> list[int]:
    """Return the bytes that operations of each rank's group along an axis send in a step that is not the first."""
    await ranks.take_step()
    groups = [getattr(one.groups, axis) for one in ranks.all]
    before = [sent_by(group, operations) for group in groups]
    await ranks.take_step()
    return [sent_by(group, operations) - earlier for group, earlier in zip(groups, before, strict=True)]


@pytest.mark.parametrize(("dp", "stage", "micro_batches"), sampled([2, 4], list(ZeROStage), [1, 2]))
async def test_replicas_send_an_all_reduce_and_stage_3_half_as_much_again(
    dp: int, stage: ZeROStage, micro_batches: int
) -> None:
    config = make_config(dp, layers=2, micro_batches=micro_batches, zero=ZeROConfig(stage=stage))
    async with running(MODEL, config) as ranks:
        part = BYTES * sum(one.size for one in ranks.all[0].parameters()) * (dp - 1) // dp
        if stage is ZeROStage.NONE:
            sent = await one_step(ranks, "world", "all_reduce")
            tokens = 8 * int(math.log2(dp))
            assert sent == [2 * part + tokens] * dp
            return
        gathers = 2 * micro_batches if stage is ZeROStage.STAGE3 else 1
        sent = await one_step(ranks, "dp", "all_gather", "reduce_scatter")
        assert sent == [part * (1 + gathers) + AGREEMENT * (dp - 1)] * dp


@pytest.mark.parametrize("strategy", [MemoryOptimizationStrategy.BASIC, MemoryOptimizationStrategy.STANDARD])
@pytest.mark.parametrize("tp", [2, 4])
async def test_slices_send_four_all_reduces_of_activations_per_layer(
    tp: int, strategy: MemoryOptimizationStrategy
) -> None:
    """And two more where a layer is recomputed; one at each end of the model, and the loss."""
    micro_batches = 2
    config = make_config(1, tp, 1, layers=2, micro_batches=micro_batches, memory_strategy=strategy)
    async with running(MODEL, config) as ranks:
        sent = await one_step(ranks, "tp", "all_reduce")
    tokens = ROWS // micro_batches * MODEL.length
    recomputed = 1 if strategy is MemoryOptimizationStrategy.STANDARD else 0
    count = 4 * MODEL.layers + 2 * recomputed + 2
    of_activations = 2 * tokens * MODEL.features * BYTES * (tp - 1) // tp
    least = micro_batches * count * of_activations
    assert min(sent) >= least
    assert max(sent) <= least * (1.0 if tp == 2 else 1.5) + micro_batches * 4 * tokens * 8 * math.log2(tp)


async def test_two_slices_send_exactly_that() -> None:
    config = make_config(1, 2, 1, layers=2, micro_batches=2, memory_strategy=MemoryOptimizationStrategy.BASIC)
    async with running(replace(MODEL, dtype="float64"), config) as ranks:
        sent = await one_step(ranks, "tp", "all_reduce")
    tokens = ROWS // 2 * MODEL.length
    assert sent == [2 * ((4 * MODEL.layers + 2) * tokens * MODEL.features * 8 + 3 * tokens * 8)] * 2


@pytest.mark.parametrize("pp", [2, 4])
async def test_stages_send_activations_and_their_gradients_once_per_boundary_and_micro_batch(pp: int) -> None:
    micro_batches = 4
    config = make_config(1, 1, pp, layers=4, micro_batches=micro_batches)
    async with running(replace(MODEL, layers=4), config) as ranks:
        results = await outcomes_of(ranks.start())
    one_way = ROWS * MODEL.length * MODEL.features * BYTES
    for rank, result in enumerate(results):
        boundaries = (rank > 0) + (rank < pp - 1)
        assert result.pipeline.bytes_sent == one_way * boundaries
        assert result.pipeline.bytes_received == one_way * boundaries
        assert sum(one.messages for one in result.pipeline.sent) == micro_batches * boundaries


FULL = {ZeROStage.NONE: (16.0, 0.0), ZeROStage.STAGE1: (8.0, 8.0), ZeROStage.STAGE2: (4.0, 12.0)}
MIXED = {ZeROStage.NONE: (16.0, 0.0), ZeROStage.STAGE1: (4.0, 12.0), ZeROStage.STAGE2: (2.0, 14.0)}


@pytest.mark.parametrize(
    ("dp", "stage", "precision"), sampled([1, 2, 4], list(ZeROStage), [Precision.FULL, Precision.BFLOAT16])
)
async def test_bytes_per_parameter_are_those_of_the_formulas(dp: int, stage: ZeROStage, precision: Precision) -> None:
    table = FULL if precision is Precision.FULL else MIXED
    whole, shared = table.get(stage, (0.0, 16.0))
    config = make_config(
        dp, layers=2, zero=ZeROConfig(stage=stage, pin_memory=stage is ZeROStage.NONE), precision=precision
    )
    async with running(MODEL, config) as ranks:
        await ranks.take_step()
        for one in ranks.all:
            values = sum(parameter.size for parameter in one.parameters())
            held = one._session.assembly.flow.memory()  # noqa: SLF001  # bytes that the gradient flow keeps are no public figure
            kept = held.parameters + held.gradients + held.optimizer_states
            assert kept / values == whole + shared / dp
