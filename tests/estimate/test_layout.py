"""Traffic and time of one layout, compared with values computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from asyncpar.core.config.parallel import PipelineScheduleType, ThreeDParallelismConfig
from asyncpar.errors import UsageError
from asyncpar.estimate.job import Job, Machine, ModelShape, rank_parameters
from asyncpar.estimate.layout import Layout, all_reduce_bytes, boundary_bytes, estimate_layouts
from asyncpar.estimate.memory import memory_requirements
from asyncpar.zero import ZeROStage

MODEL = ModelShape(layers=8, hidden=64, heads=4, vocabulary=100, sequence=32, is_tied=False)
MACHINE = Machine(ranks_per_host=4, flops=1e9, bandwidth=1e6, host_bandwidth=4e6)
JOB = Job(model=MODEL, machine=MACHINE, batch=16)
PAYLOAD = 4 * 32 * 64
"""Bytes of the activations of one micro-batch between two layers."""


def config(**settings: Any) -> ThreeDParallelismConfig:
    wanted = {"num_layers": 8, "pipeline_schedule": PipelineScheduleType.ONE_FORWARD_ONE_BACKWARD}
    return ThreeDParallelismConfig(**{**wanted, **settings})


def layout(job: Job = JOB, *, zero: ZeROStage = ZeROStage.NONE, **settings: Any) -> Layout:
    (found,) = estimate_layouts(job, config(**settings), [zero])
    return found


def forward_seconds(layers: int, *, head: bool) -> float:
    return 32 * (layers * MODEL.layer_flops + (MODEL.head_flops if head else 0)) / 1e9


def test_one_rank_only_computes() -> None:
    alone = layout()
    assert alone.traffic.total == 0.0
    assert alone.step_seconds == pytest.approx(16 * 3 * forward_seconds(8, head=True))
    assert alone.pipeline.bubble_fraction == 0.0


def test_replicas_divide_the_work_and_reduce_gradients() -> None:
    two = layout(dp_size=2)
    size = 4 * MODEL.parameters
    assert two.micro_batches == 8
    assert two.traffic.data == two.traffic.total == all_reduce_bytes(size, 2)
    assert two.step_seconds == pytest.approx(8 * 3 * forward_seconds(8, head=True) + all_reduce_bytes(size, 2) / 4e6)


def test_tensor_parallel_ranks_reduce_four_times_a_layer_and_at_the_ends() -> None:
    two = layout(tp_size=2)
    assert two.traffic.tensor == two.traffic.total == 16 * (4 * 8 + 2) * all_reduce_bytes(PAYLOAD, 2)
    computing = 16 * 3 * forward_seconds(8, head=True) / 2
    assert two.step_seconds == pytest.approx(computing + two.traffic.tensor / 4e6)


def test_stages_send_activations_on_and_gradients_back() -> None:
    four = layout(pp_size=4)
    assert four.traffic.pipeline == 16 * 2 * PAYLOAD
    assert layout(pp_size=2).traffic.pipeline == 16 * PAYLOAD
    assert boundary_bytes(PAYLOAD) == 2 * PAYLOAD


def test_pieces_that_meet_on_one_rank_send_nothing() -> None:
    v_shaped = layout(pp_size=2, pipeline_schedule=PipelineScheduleType.ZBV)
    looped = layout(pp_size=2, pipeline_schedule=PipelineScheduleType.INTERLEAVED_ONE_F1B, num_model_chunks=2)
    assert v_shaped.traffic.pipeline == 16 * 2 * PAYLOAD
    assert looped.traffic.pipeline == 16 * 3 * PAYLOAD


def test_a_pipeline_of_two_takes_the_slower_stage_and_the_bubble() -> None:
    two = layout(replace(JOB, machine=replace(MACHINE, host_bandwidth=4e9)), pp_size=2)
    first, last = forward_seconds(4, head=False), forward_seconds(4, head=True)
    assert two.pipeline.ideal == pytest.approx(16 * 3 * last)
    assert two.step_seconds == pytest.approx(16 * 3 * last + 3 * first + 2 * PAYLOAD / 4e9)


def test_tied_embeddings_at_both_ends_are_reduced() -> None:
    job = replace(JOB, model=replace(MODEL, is_tied=True))
    assert layout(job, pp_size=2).traffic.embedding == 4 * 100 * 64
    assert layout(job, pp_size=2, pipeline_schedule=PipelineScheduleType.ZBV).traffic.embedding == 0.0
    assert layout(pp_size=2).traffic.embedding == 0.0


def test_sharded_gradients_of_tied_embeddings_are_reduced_by_their_owners() -> None:
    job = replace(JOB, model=replace(MODEL, is_tied=True))
    assert layout(job, zero=ZeROStage.STAGE1, dp_size=4, pp_size=2).traffic.embedding == 4 * 100 * 64 / 4


def test_stage_3_sends_and_waits_more_but_needs_less() -> None:
    job = replace(JOB, model=replace(MODEL, hidden=512))
    plain, sharded = layout(job, dp_size=4), layout(job, dp_size=4, zero=ZeROStage.STAGE3)
    assert sharded.traffic.data > plain.traffic.data
    assert sharded.step_seconds > plain.step_seconds
    assert sharded.memory.total < plain.memory.total


def test_recomputation_takes_a_third_more() -> None:
    again = layout(replace(JOB, recompute=True))
    alone = 16 * (4 * 8 * MODEL.layer_flops + 3 * MODEL.head_flops) * 32 / 1e9
    assert again.step_seconds == pytest.approx(alone)
    assert again.memory.activations < layout().memory.activations


def test_recomputed_layers_reduce_once_more_for_each_block() -> None:
    assert layout(replace(JOB, recompute=True), tp_size=2).traffic.tensor == 16 * (6 * 8 + 2) * all_reduce_bytes(
        PAYLOAD, 2
    )


def test_slow_links_between_hosts_hurt_what_crosses_them() -> None:
    adjacent, apart = layout(dp_size=2, tp_size=4, order="tp-dp-pp"), layout(dp_size=2, tp_size=4, order="dp-tp-pp")
    assert adjacent.traffic == apart.traffic
    assert adjacent.step_seconds < apart.step_seconds


def test_memory_is_that_of_the_requirements() -> None:
    found = layout(zero=ZeROStage.STAGE2, dp_size=2, pp_size=2)
    strategy = config(dp_size=2, pp_size=2, memory_strategy="basic")
    needed = memory_requirements(strategy, MODEL, micro_batches=8, stage=2)
    assert found.memory.total == pytest.approx(needed.total_memory_mb * (1 << 20))
    assert found.memory.accumulating == 4 * max(rank_parameters(MODEL, strategy))
    assert found.memory.state.total == pytest.approx(10 * max(rank_parameters(MODEL, strategy)))


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UsageError, match="batch: expected a multiple of dp_size"):
        layout(dp_size=3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 0}, "batch: expected a positive number, got 0"),
        ({"micro_batch_size": 0}, "micro_batch_size: expected a positive number, got 0"),
        ({"precision": "fp8"}, "precision: expected one of fp32, mixed, got 'fp8'"),
        ({"memory_strategy": "none"}, "memory_strategy: expected one of basic"),
        ({"optimizer_states": -1}, "optimizer_states: expected 0 or more, got -1"),
        ({"order": "tp-dp"}, "order: expected every axis of dp-tp-pp, got 'tp-dp' without pp"),
    ],
)
def test_impossible_jobs_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(JOB, **settings)
