"""Real training sends what the estimate predicts, to the byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.parallel import ThreeDParallelismConfig
from asyncpar.estimate import Job, Machine, ModelShape, all_reduce_bytes, rank_traffics
from asyncpar.hybrid import ThreeDParallelismCoordinator, TransformerModel
from asyncpar.nn import TransformerConfig
from asyncpar.tensors.process_groups import ProcessGroups
from asyncpar.zero import ZeROConfig, ZeROStage
from tests.hybrid.worlds import make_config, on_ranks, train_step

MODEL = TransformerConfig(vocabulary=16, length=8, features=16, layers=4, heads=4, dtype="float32")
SHAPE = ModelShape(layers=4, hidden=16, heads=4, vocabulary=16, sequence=8, is_tied=False, has_query_bias=False)
MICRO_BATCH = 2
SMALL_TALK = 64
"""Bytes by which ranks of a data-parallel group agree on each step."""


@dataclass(frozen=True)
class Sent:
    """What one rank sent in a step."""

    data: int
    tensor: int
    pipeline: int
    embedding: int
    pp_rank: int


async def measure(
    sizes: tuple[int, int, int], micro_batches: int, *, zero: int = 0, is_tied: bool = False, **settings: Any
) -> tuple[Sequence[Sent], Job, ThreeDParallelismConfig]:
    """Train for two steps; return what each rank sent in the second, and the same as a job."""
    dp, tp, pp = sizes
    config = make_config(
        dp,
        tp,
        pp,
        layers=MODEL.layers,
        micro_batches=micro_batches,
        zero=ZeROConfig(stage=ZeROStage.of(zero)),
        micro_batch_size=MICRO_BATCH,
        **{"memory_strategy": "basic", "pipeline_schedule": "one_forward_one_backward", **settings},
    )
    model = replace(MODEL, tied_embeddings=is_tied)
    rows = dp * micro_batches * MICRO_BATCH

    async def main(world: Communicator) -> Sent:
        made = await ThreeDParallelismCoordinator.create(config, TransformerModel(config=model), world)
        async with made as coordinator:
            groups = coordinator.groups
            await train_step(coordinator, model, 0, rows=rows)
            replicas = groups.world if groups.dp.size == world.size and zero == 0 else groups.dp
            before = replicas.traffic.payload_bytes, groups.tp.traffic.payload_bytes
            ends = ProcessGroups.of(config.parallelism, groups.mapping, groups.world).embedding if is_tied else None
            tied_before = 0 if ends is None else ends.traffic.payload_bytes
            result = await train_step(coordinator, model, 1, rows=rows)
            return Sent(
                data=replicas.traffic.payload_bytes - before[0],
                tensor=groups.tp.traffic.payload_bytes - before[1],
                pipeline=result.pipeline.bytes_sent,
                embedding=0 if ends is None else ends.traffic.payload_bytes - tied_before,
                pp_rank=groups.mapping.pp_rank,
            )

    job = Job(
        model=replace(SHAPE, is_tied=is_tied),
        machine=Machine(ranks_per_host=8),
        batch=rows,
        micro_batch_size=MICRO_BATCH,
        recompute=config.parallelism.enable_gradient_checkpointing,
    )
    return await on_ranks(dp * tp * pp, main), job, config.parallelism


def cross_entropy_bytes(tp: int, micro_batches: int) -> float:
    """Return what a vocabulary-parallel cross-entropy sends: a maximum in float32 and two sums in float64 per token."""
    return micro_batches * all_reduce_bytes(MICRO_BATCH * SHAPE.sequence * (4 + 2 * 8), tp)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("pp", [1, 2])
async def test_tensor_parallel_ranks_send_four_or_six_all_reduces_a_layer(pp: int, recompute: bool) -> None:
    sent, job, config = await measure((1, 2, pp), 3, enable_gradient_checkpointing=recompute)
    expected = rank_traffics(job, config, ZeROStage.NONE)
    for one in sent:
        loss = cross_entropy_bytes(2, 3) if one.pp_rank == pp - 1 else 0
        assert one.tensor == expected[one.pp_rank].tensor + loss


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pipeline_schedule": "gpipe"},
        {"pipeline_schedule": "zbv"},
        {"pipeline_schedule": "interleaved_one_f1b", "num_model_chunks": 2},
    ],
    ids=str,
)
async def test_stages_send_activations_and_gradients_over_every_boundary(settings: dict[str, Any]) -> None:
    sent, job, config = await measure((1, 1, 2), 4, **settings)
    expected = rank_traffics(job, config, ZeROStage.NONE)
    assert [one.pipeline for one in sent] == [expected[one.pp_rank].pipeline for one in sent]


@pytest.mark.parametrize("zero", range(4))
async def test_replicas_send_what_their_zero_stage_takes(zero: int) -> None:
    sent, job, config = await measure((2, 1, 1), 2, zero=zero)
    (expected,) = rank_traffics(job, config, ZeROStage.of(zero))
    for one in sent:
        assert expected.data <= one.data <= expected.data + SMALL_TALK


async def test_the_ends_of_a_pipeline_reduce_a_tied_embedding() -> None:
    sent, job, config = await measure((1, 1, 3), 2, is_tied=True, layers_per_stage=(2, 1, 1))
    expected = rank_traffics(job, config, ZeROStage.NONE)
    assert [one.embedding for one in sent] == [traffic.embedding for traffic in expected]
    assert expected[0].embedding == 4 * SHAPE.vocabulary * SHAPE.hidden


async def test_a_cube_of_ranks_sends_all_three() -> None:
    sent, job, config = await measure((2, 2, 2), 2, zero=1)
    expected = rank_traffics(job, config, ZeROStage.STAGE1)
    for one in sent:
        mine = expected[one.pp_rank]
        assert mine.data <= one.data <= mine.data + SMALL_TALK
        assert one.pipeline == mine.pipeline
        assert one.tensor == mine.tensor + (cross_entropy_bytes(2, 2) if one.pp_rank == 1 else 0)
