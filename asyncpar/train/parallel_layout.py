"""The parallel layout of a training run as options of a command line."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from asyncpar.core.config.parallel import MemoryOptimizationStrategy, PipelineScheduleType, ThreeDParallelismConfig
from asyncpar.core.config.strategies import ZeROStage
from asyncpar.errors import UsageError
from asyncpar.gradsync import GradientBucketingConfig, GradientCompressionConfig
from asyncpar.hybrid import HybridConfig, Precision
from asyncpar.pipeline import load_schedule
from asyncpar.shards.plan import split_bounds
from asyncpar.train.language_model import TrainingConfig
from asyncpar.zero.config import ZeROConfig


class Recompute(StrEnum):
    """The choice of the blocks that keep the activations of their backward pass.

    BASIC: all, STANDARD: every second, AGGRESSIVE: every fourth, EXTREME: these on disk, ALL: none.
    """

    BASIC = "basic"
    STANDARD = "standard"
    AGGRESSIVE = "aggressive"
    EXTREME = "extreme"
    ALL = "all"


_NAMED = PipelineScheduleType.ONE_FORWARD_ONE_BACKWARD
"""Placeholder for the name of a schedule from a user's file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Sizes of data, tensor and pipeline parallelism, and related settings.

    ``dp`` None: as many replicas as fit the ranks.  ``micro_batches`` None: 1 without a pipeline, else 4.  ``schedule``
    is the name of a schedule, or a file with one, see ``load_schedule``.

    ``tp`` and ``pp`` are the number of ranks that share each layer, and of stages; ``chunks`` that of pieces of the
    model on each rank, ``zero`` the stage of ZeRO (0: none), ``recompute`` the choice of activations that are
    recomputed in the backward pass, ``precision`` that of the layers' numbers.
    """

    dp: int | None = None
    tp: int = 1
    pp: int = 1
    schedule: str | Path = PipelineScheduleType.ONE_FORWARD_ONE_BACKWARD
    chunks: int = 1
    zero: int = 0
    micro_batches: int | None = None
    recompute: Recompute = Recompute.BASIC
    precision: Precision = Precision.FULL

    @property
    def is_plain(self) -> bool:
        """Whether this is data parallelism alone."""
        return self == ParallelLayout(dp=self.dp)

    def replicas(self, world_size: int) -> int:
        """Return ``dp`` in a world of that size.  Raises ``UsageError`` if the sizes do not match it."""
        if min(self.tp, self.pp, self.dp or 1) < 1:
            raise UsageError(f"--dp, --tp, --pp: expected positive numbers, got {self.dp}, {self.tp}, {self.pp}")
        dp = world_size // (self.tp * self.pp) if self.dp is None else self.dp
        if dp * self.tp * self.pp != world_size:
            given = "" if self.dp is None else f"dp {self.dp} * "
            raise UsageError(
                f"--dp, --tp, --pp: expected {given}tp {self.tp} * pp {self.pp} "
                f"to {'divide' if self.dp is None else 'be'} the number of ranks, {world_size}"
            )
        return dp

    def describe(self, world_size: int) -> str:
        """Return the layout in a few words, without dimensions of size 1."""
        parts = [f"dp {self.replicas(world_size)}"]
        parts += [f"{name} {size}" for name, size in (("tp", self.tp), ("pp", self.pp)) if size > 1]
        parts += [f"zero {self.zero}"] if self.zero else []
        if self.pp > 1:
            parts.append(self.schedule.name if isinstance(self.schedule, Path) else str(self.schedule))
        if self.recompute is not Recompute.BASIC:
            parts.append(f"recompute {self.recompute}")
        if self.precision is not Precision.FULL:
            parts.append(str(self.precision))
        return ", ".join(parts)

    def make_config(
        self,
        training: TrainingConfig,
        *,
        world_size: int,
        compression: GradientCompressionConfig,
        bucketing: GradientBucketingConfig,
    ) -> HybridConfig:
        """Return the settings of the run.  Raises ``UsageError`` for a layout that ``training`` cannot have."""
        dp, layers = self.replicas(world_size), training.model.layers
        if training.tuning is not None:
            raise UsageError("--tune: is for data parallelism alone, without checkpoints; leave it out")
        if self.pp > layers:
            raise UsageError(f"--pp: expected at most one stage for each of {layers} layers, got {self.pp}")
        micro_batches = (1 if self.pp == 1 else 4) if self.micro_batches is None else self.micro_batches
        if micro_batches < 1 or training.rows < dp * micro_batches:
            raise UsageError(
                f"--micro-batches: expected 1 to {training.rows // dp} with a batch of {training.rows} rows over {dp} "
                f"replicas, got {micro_batches}"
            )
        schedule = load_schedule(self.schedule) if isinstance(self.schedule, Path) else None
        strategy = (
            MemoryOptimizationStrategy.BASIC
            if self.recompute is Recompute.ALL
            else MemoryOptimizationStrategy(self.recompute)
        )
        return HybridConfig(
            parallelism=ThreeDParallelismConfig(
                dp_size=dp,
                tp_size=self.tp,
                pp_size=self.pp,
                num_layers=layers,
                layers_per_stage=tuple(stop - start for start, stop in split_bounds(layers, self.pp)),
                num_model_chunks=self.chunks,
                pipeline_schedule=_NAMED if isinstance(self.schedule, Path) else self.schedule,
                memory_strategy=strategy,
                enable_gradient_checkpointing=self.recompute is Recompute.ALL,
                micro_batch_size=1 if training.rows % (dp * micro_batches) else training.rows // (dp * micro_batches),
                communication_timeout_ms=300_000,
            ),
            micro_batches=micro_batches,
            rule=training.rule,
            clip_norm=training.clip_norm,
            zero=ZeROConfig(stage=ZeROStage.of(self.zero)),
            precision=self.precision,
            compression=compression,
            bucketing=bucketing,
            schedule=schedule,
        )
