"""Memory of a rank: parameters where they are, and what the schedule keeps."""

from __future__ import annotations

import math
from typing import Any

import pytest

from asyncpar.core.config.parallel import MemoryOptimizationStrategy, PipelineScheduleType, ThreeDParallelismConfig
from asyncpar.errors import UsageError
from asyncpar.estimate.activations import ActivationModel
from asyncpar.estimate.job import ModelShape, Precision, rank_parameters, rank_shapes
from asyncpar.estimate.memory import ActivationPolicy, memory_requirements, rank_activations, rank_memories
from asyncpar.gradsync import GradientCompressionConfig
from asyncpar.zero import ZeROConfig, ZeROStage

MODEL = ModelShape(layers=8, hidden=64, heads=4, vocabulary=101, sequence=32)
UNTIED = ModelShape(layers=8, hidden=64, heads=4, vocabulary=101, sequence=32, is_tied=False)
ACTIVATIONS = ActivationModel(shape=MODEL, value_bytes=4)
MEBIBYTE = 1 << 20
ALL = ActivationPolicy()


def config(**settings: Any) -> ThreeDParallelismConfig:
    wanted = {
        "num_layers": 8,
        "pipeline_schedule": PipelineScheduleType.ONE_FORWARD_ONE_BACKWARD,
        "memory_strategy": MemoryOptimizationStrategy.BASIC,
    }
    return ThreeDParallelismConfig(**{**wanted, **settings})


def test_stages_hold_the_whole_model_once() -> None:
    assert sum(rank_parameters(UNTIED, config(pp_size=4))) == UNTIED.parameters
    assert rank_parameters(UNTIED, config()) == (UNTIED.parameters,)
    assert rank_parameters(MODEL, config()) == (MODEL.parameters,)


def test_a_tied_embedding_is_held_at_both_ends_but_once_on_one_rank() -> None:
    assert sum(rank_parameters(MODEL, config(pp_size=2))) == MODEL.parameters + MODEL.embedding_parameters()
    v_shaped = config(pp_size=2, pipeline_schedule=PipelineScheduleType.ZBV)
    assert sum(rank_parameters(MODEL, v_shaped)) == MODEL.parameters
    assert rank_parameters(MODEL, v_shaped)[1] == 4 * MODEL.layer_parameters()


def test_tensor_parallel_ranks_hold_their_slices() -> None:
    expected = 8 * MODEL.layer_parameters(4) + MODEL.embedding_parameters(4) + (32 + 2) * 64
    assert rank_parameters(MODEL, config(tp_size=4)) == (expected,)


def test_activations_are_those_of_the_micro_batches_in_flight() -> None:
    piece = 4 * ACTIVATIONS.layer
    first, last = rank_activations(config(pp_size=2), ACTIVATIONS, ALL, micro_batches=8)
    assert first == pytest.approx(2 * (piece + ACTIVATIONS.input_end))
    assert last == pytest.approx(piece + ACTIVATIONS.output_end)


def test_gpipe_keeps_every_micro_batch() -> None:
    gpipe = config(pp_size=2, pipeline_schedule=PipelineScheduleType.GPIPE)
    first, _ = rank_activations(gpipe, ACTIVATIONS, ALL, micro_batches=8)
    assert first == pytest.approx(8 * (4 * ACTIVATIONS.layer + ACTIVATIONS.input_end))


def test_recomputation_keeps_inputs_and_the_layer_in_work() -> None:
    policy = ActivationPolicy(recompute_all=True)
    (found,) = rank_activations(config(), ACTIVATIONS, policy, micro_batches=1)
    ends = ACTIVATIONS.input_end + ACTIVATIONS.output_end
    assert found == pytest.approx(8 * 4 * 32 * 64 + ends + ACTIVATIONS.layer)


def test_strategies_need_less_and_less() -> None:
    needed = []
    for strategy in MemoryOptimizationStrategy:
        policy = ActivationPolicy(strategy=strategy)
        needed.append(rank_activations(config(pp_size=2), ACTIVATIONS, policy, micro_batches=8)[0])
    basic, standard, aggressive, extreme = needed
    assert basic > standard > aggressive >= extreme


def test_what_is_on_disk_does_not_count() -> None:
    gpipe = config(pp_size=2, pipeline_schedule=PipelineScheduleType.GPIPE)
    policy = ActivationPolicy(strategy=MemoryOptimizationStrategy.EXTREME)
    few, many = (rank_activations(gpipe, ACTIVATIONS, policy, micro_batches=count)[0] for count in (2, 64))
    assert few == many


def test_requirements_are_those_of_the_fullest_rank() -> None:
    needed = memory_requirements(config(dp_size=2, pp_size=2), MODEL, stage=1)
    parameters = max(rank_parameters(MODEL, config(pp_size=2)))
    assert needed.model_memory_mb == pytest.approx(8 * parameters / MEBIBYTE)
    assert needed.optimizer_memory_mb == pytest.approx(8 / 2 * parameters / MEBIBYTE)


@pytest.mark.parametrize(("stage", "whole"), [(0, 0), (1, 0), (2, 4), (3, 4)])
def test_gradients_are_whole_until_they_are_reduced(stage: int, whole: float) -> None:
    (memory,) = rank_memories(MODEL, config(dp_size=4), [0.0], stage=stage, precision=Precision.FP32)
    assert memory.accumulating == whole * MODEL.parameters
    assert memory.flow - memory.held == memory.accumulating + memory.buffers.gathered - memory.buffers.waiting


def test_buckets_count() -> None:
    """Without ZeRO gradients are copied into buckets; with it only some are under way."""
    parameters = 4 * MODEL.parameters / MEBIBYTE
    several, one = (memory_requirements(config(dp_size=size), MODEL) for size in (4, 1))
    assert several.communication_memory_mb == one.communication_memory_mb == pytest.approx(parameters)
    sent = several.communication_memory_mb + several.activation_memory_mb
    assert several.total_memory_mb == pytest.approx(several.model_memory_mb + several.optimizer_memory_mb + sent)
    encoded = memory_requirements(config(dp_size=4), MODEL, compression=GradientCompressionConfig(codec="int8"))
    assert encoded.communication_memory_mb > 3 * parameters, "a bucket, two residuals, and the encoded values"
    zero = ZeROConfig(stage=ZeROStage.STAGE1, gradient_compression=True)
    rounded, plain = (memory_requirements(config(dp_size=4), MODEL, stage=stage) for stage in (zero, 1))
    assert rounded.communication_memory_mb > plain.communication_memory_mb + 2 * parameters


def test_shapes_are_all_parameters() -> None:
    for model, settings in ((MODEL, {}), (UNTIED, {"pp_size": 4}), (MODEL, {"pp_size": 2, "tp_size": 4})):
        spread = config(**settings)
        counts = [sum(math.prod(shape) for layer in layers for shape in layer) for layers in rank_shapes(model, spread)]
        assert tuple(counts) == rank_parameters(model, spread)


def test_mixed_precision_and_checkpointing_come_from_the_configuration() -> None:
    single = memory_requirements(config(), MODEL)
    mixed = memory_requirements(config(enable_mixed_precision=True), MODEL)
    again = memory_requirements(config(enable_gradient_checkpointing=True), MODEL)
    assert mixed.model_memory_mb == single.model_memory_mb / 2
    assert mixed.activation_memory_mb < single.activation_memory_mb
    assert again.activation_memory_mb < single.activation_memory_mb / 2


def test_the_rough_rule_needs_no_model() -> None:
    assert memory_requirements(config(), rough=True) == config().memory_requirements()


@pytest.mark.parametrize(
    ("settings", "model", "message"),
    [
        ({}, None, "model: expected the shape of a model unless rough=True, got None"),
        ({"num_layers": 4}, MODEL, "model: expected num_layers = 4 layers, got 8"),
        ({"tp_size": 3}, MODEL, "tp_size: expected a divisor of hidden = 64, got 3"),
        ({"tp_size": 8}, MODEL, "tp_size: expected a divisor of heads = 4, got 8"),
        ({"pp_size": 3}, MODEL, "num_layers: expected a multiple of pp_size = 3, got 8"),
    ],
)
def test_models_that_do_not_fit_are_refused(settings: dict[str, Any], model: ModelShape | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        memory_requirements(config(**settings), model)


def test_a_wrong_number_of_micro_batches_is_refused() -> None:
    with pytest.raises(UsageError, match="micro_batches: expected a positive number, got 0"):
        memory_requirements(config(), MODEL, micro_batches=0)
