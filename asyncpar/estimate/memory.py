"""The memory of a rank: parameters, gradients, optimizer states and activations.  Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncpar.core.config.checks import check_choice, check_count
from asyncpar.core.config.parallel import MemoryOptimizationStrategy, MemoryRequirements, ThreeDParallelismConfig
from asyncpar.core.config.strategies import ZeROStage
from asyncpar.errors import UsageError
from asyncpar.estimate.activations import ActivationModel, kept_layers
from asyncpar.estimate.buffers import BufferBytes, reduced_buffers, sharded_buffers
from asyncpar.estimate.job import (
    ADAM_STATES,
    ModelShape,
    Precision,
    VirtualStage,
    rank_parameters,
    rank_shapes,
    virtual_stages,
)
from asyncpar.estimate.pipelining import peak_bytes
from asyncpar.gradsync.config import GradientCompressionConfig
from asyncpar.pipeline.registry import schedule_of
from asyncpar.zero.config import ZeROConfig

_SINGLE = 4
"""Bytes of a float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes of one rank for all parameters that it computes with, or for each of them."""

    values: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.values + self.gradients + self.optimizer

    def times(self, parameters: int) -> StateBytes:
        """Return the same for ``parameters`` parameters."""
        return StateBytes(
            values=self.values * parameters,
            gradients=self.gradients * parameters,
            optimizer=self.optimizer * parameters,
        )


def bytes_per_parameter(
    stage: ZeROStage | int,
    replicas: int,
    precision: Precision | str = Precision.FP32,
    *,
    optimizer_states: int = ADAM_STATES,
) -> StateBytes:
    """Return the bytes per parameter on each of ``replicas`` ranks with ZeRO ``stage``.

    With Adam, for stages 0 to 3 and N replicas: in single precision 16; 8 + 8/N; 4 + 12/N; 16/N; in mixed precision 16;
    4 + 12/N; 2 + 14/N; 16/N.  Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models" (2020), figure 1, where K = 12.

    ``optimizer_states`` is the number of values that the optimizer keeps for each.
    """
    number = zero_stage_number(stage)
    check_count("replicas", replicas)
    check_count("optimizer_states", optimizer_states, least=0)
    precision = check_choice("precision", Precision, precision)
    master = 0 if precision is Precision.FP32 else _SINGLE
    return StateBytes(
        values=precision.value_bytes / (replicas if number >= 3 else 1),
        gradients=precision.value_bytes / (replicas if number >= 2 else 1),
        optimizer=(master + _SINGLE * optimizer_states) / (replicas if number >= 1 else 1),
    )


def zero_stage_number(stage: ZeROStage | int) -> int:
    """Return 0 to 3 for a stage or its number.  Raises ``UsageError`` for any other."""
    return stage.number if isinstance(stage, ZeROStage) else ZeROStage.of(stage).number


_MEBIBYTE = float(1 << 20)
_WORKSPACE = 2
"""Temporary arrays of the size of the largest parameter: its gradient, before it is added, and the update's."""
_ON_THEIR_WAY = 2
"""Pieces of activations in memory while others are on disk: the one in use and the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes that one rank needs.

    ``state`` is permanent.  ``accumulating`` are the whole gradients of ZeRO stages 2 and 3: micro-batches add to them,
    and they are sharded as they are reduced, which may be when the last of them is final.  ``buffers`` are the
    communication buffers.  Memory of ``activations`` is kept from one step to the next.

    ``workspace`` is the temporary memory of passes and updates: an array or two of the size of the largest parameter,
    which the C library does not return.
    """

    state: StateBytes
    accumulating: float
    activations: float
    buffers: BufferBytes = field(default_factory=BufferBytes)
    workspace: float = 0.0

    @property
    def flow(self) -> float:
        """Peak bytes of parameters, gradients, states and buckets in a step."""
        sent = self.buffers.buckets + self.buffers.gathered + self.buffers.residuals
        return self.state.total + self.accumulating + sent

    @property
    def held(self) -> float:
        """Bytes of parameters, gradients, states and buckets between steps."""
        return self.state.total + self.buffers.buckets + self.buffers.waiting + self.buffers.residuals

    @property
    def between_steps(self) -> float:
        """Bytes of the process between steps, besides those of Python and libraries."""
        return self.held + self.activations + self.workspace

    @property
    def total(self) -> float:
        """Peak bytes in a step."""
        return self.flow + self.activations + self.workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationPolicy:
    """The choice of kept activations, and their place."""

    strategy: MemoryOptimizationStrategy = MemoryOptimizationStrategy.BASIC
    recompute_all: bool = False

    def kept(self, layers: int) -> int:
        """Return how many of ``layers`` are not recomputed."""
        return kept_layers(self.strategy, layers, recompute_all=self.recompute_all)

    def stage_bytes(self, stage: VirtualStage, activations: ActivationModel) -> float:
        """Return the bytes that one micro-batch leaves in a piece of the model."""
        ends = activations.input_end * stage.is_first + activations.output_end * stage.is_last
        return activations.layers(stage.layers, self.kept(stage.layers)) + ends

    def rank_bytes(self, peak: float, mine: Sequence[VirtualStage], activations: ActivationModel) -> float:
        """Return the bytes of a rank with the pieces ``mine``, if ``peak`` bytes are in flight.

        A recomputed layer is whole while its backward pass runs.  Activations that EXTREME puts on disk do not count.
        """
        if self.strategy is MemoryOptimizationStrategy.EXTREME:
            largest = max(self.stage_bytes(stage, activations) for stage in mine)
            peak = min(peak, _ON_THEIR_WAY * largest)
        recomputes = any(self.kept(stage.layers) < stage.layers for stage in mine)
        return peak + (activations.layer if recomputes else 0.0)


def rank_activations(
    config: ThreeDParallelismConfig, activations: ActivationModel, policy: ActivationPolicy, *, micro_batches: int
) -> tuple[float, ...]:
    """Return the bytes of activations that each pipeline rank needs.

    These are the bytes that a micro-batch leaves in each piece of the model, times the micro-batches that the schedule
    has in flight there.
    """
    stages = virtual_stages(config)
    schedule = schedule_of(config, micro_batches)
    peaks = peak_bytes(schedule, [policy.stage_bytes(piece, activations) for piece in stages])
    return tuple(
        policy.rank_bytes(peak, [piece for piece in stages if piece.rank == rank], activations)
        for rank, peak in enumerate(peaks)
    )


def rank_memories(
    model: ModelShape,
    config: ThreeDParallelismConfig,
    activations: Sequence[float],
    *,
    stage: ZeROStage | int | ZeROConfig,
    precision: Precision,
    optimizer_states: int = ADAM_STATES,
    compression: GradientCompressionConfig | None = None,
) -> tuple[RankMemory, ...]:
    """Return the memory of each pipeline rank, on its largest tensor-parallel rank, besides its ``activations``.

    It consists of its parameters times ``bytes_per_parameter``, and its buffers.  ``stage`` may be all settings of
    ZeRO; ``compression`` is that of stage 0.
    """
    zero = stage if isinstance(stage, ZeROConfig) else ZeROConfig(stage=ZeROStage.of(zero_stage_number(stage)))
    each = bytes_per_parameter(zero.stage, config.dp_size, precision, optimizer_states=optimizer_states)
    of_others = 0.0
    if zero.stage.shards_gradients:
        of_others = precision.value_bytes - each.gradients + _SINGLE / config.dp_size  # sums are kept in float32
    dtype = f"f{precision.value_bytes}"
    return tuple(
        RankMemory(
            state=each.times(parameters),
            accumulating=of_others * parameters,
            activations=kept,
            buffers=sharded_buffers(layers, config.dp_size, zero, dtype, runs=config.chunks_per_stage)
            if zero.stage.shards_states
            else reduced_buffers(layers, config.dp_size, compression or GradientCompressionConfig(), dtype),
            workspace=_WORKSPACE * _SINGLE * max(math.prod(shape) for layer in layers for shape in layer),
        )
        for parameters, kept, layers in zip(
            rank_parameters(model, config), activations, rank_shapes(model, config), strict=True
        )
    )


def memory_requirements(
    config: ThreeDParallelismConfig,
    model: ModelShape | None = None,
    *,
    rough: bool = False,
    micro_batches: int | None = None,
    stage: ZeROStage | int | ZeROConfig = ZeROStage.NONE,
    optimizer_states: int = ADAM_STATES,
    sequence_parallel: bool = False,
    compression: GradientCompressionConfig | None = None,
) -> MemoryRequirements:
    """Return the peak memory of the fullest rank in a step, in MiB.

    Values and gradients are ``model_memory_mb``, buckets, residuals and gathered values ``communication_memory_mb``.

    ``rough``: the rule of thumb that needs no ``model``, ``config.memory_requirements()``.  ``micro_batches`` is the
    number that each replica runs per step, by default twice the number of stages, beyond which most schedules have no
    more of them in flight.  Precision, memory strategy and recomputation are those of ``config``.

    ``stage`` is that of ZeRO, or all its settings, ``optimizer_states`` the number of values that the optimizer keeps
    for each parameter; with ``sequence_parallel`` tensor-parallel ranks divide sequences between layers.
    ``compression`` is that of gradients without ZeRO.
    """
    if rough:
        return config.memory_requirements(rough=True)
    model = _checked_model(config, model)
    count = 2 * config.pp_size if micro_batches is None else check_count("micro_batches", micro_batches)
    precision = Precision.MIXED if config.enable_mixed_precision else Precision.FP32
    activations = ActivationModel.of(
        model, config, value_bytes=precision.value_bytes, sequence_parallel=sequence_parallel
    )
    policy = ActivationPolicy(strategy=config.memory_strategy, recompute_all=config.enable_gradient_checkpointing)
    memories = rank_memories(
        model,
        config,
        rank_activations(config, activations, policy, micro_batches=count),
        stage=stage,
        precision=precision,
        optimizer_states=optimizer_states,
        compression=compression,
    )
    fullest = max(memories, key=lambda memory: memory.total)
    buffers = fullest.buffers
    return MemoryRequirements(
        model_memory_mb=(fullest.state.values + fullest.state.gradients + fullest.accumulating) / _MEBIBYTE,
        activation_memory_mb=(fullest.activations + fullest.workspace) / _MEBIBYTE,
        optimizer_memory_mb=fullest.state.optimizer / _MEBIBYTE,
        communication_memory_mb=(buffers.buckets + buffers.gathered + buffers.residuals) / _MEBIBYTE,
    )


def _checked_model(config: ThreeDParallelismConfig, model: ModelShape | None) -> ModelShape:
    if model is None:
        raise UsageError("model: expected the shape of a model unless rough=True, got None")
    if model.layers != config.num_layers:
        raise UsageError(f"model: expected num_layers = {config.num_layers} layers, got {model.layers}")
    config.validate(config.world_size, hidden=model.hidden, heads=model.heads)
    return model
