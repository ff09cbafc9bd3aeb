"""Settings of 3D-parallel training beyond the layout of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from asyncpar.core.config.parallel import ThreeDParallelismConfig
from asyncpar.core.config.strategies import ZeROStage
from asyncpar.errors import UsageError
from asyncpar.gradsync import GradientBucketingConfig, GradientCompressionConfig
from asyncpar.hybrid.loss_scaling import NO_SCALING, LossScaling
from asyncpar.nn.half import half_dtype
from asyncpar.nn.optimizers import AdamW, Rule
from asyncpar.pipeline.registry import schedule_of
from asyncpar.pipeline.schedule import Schedule
from asyncpar.zero.config import ZeROConfig

_OF_SHARDS = (
    "bucket_size_mb",
    "overlap_comm",
    "reduce_bucket_size",
    "max_memory_usage_mb",
    "gradient_compression",
    "error_feedback",
    "algorithm",
    "prefetch_depth",
    "pin_memory",
)
"""Settings of ZeRO for the size, encoding and memory of its buckets."""


class Precision(StrEnum):
    """Storage precision of parameters and gradients.

    FULL is the model's own dtype.  With the others, optimizers keep float32 master values, layers compute in float32,
    and a step whose gradients overflow on any rank is skipped on all.
    """

    FULL = "full"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def storage(self) -> np.dtype[Any] | None:
        """The dtype in which parameters are stored; None for the model's own."""
        match self:
            case Precision.FULL:
                return None
            case Precision.BFLOAT16:
                return half_dtype("bfloat16")
            case Precision.FLOAT16:
                return half_dtype("float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig:
    """Settings of training a model over the ranks of ``parallelism``.

    - ``micro_batches``: the number of parts of each replica's batch, over which gradients accumulate.
    - ``rule``, ``clip_norm``: the optimizer, and the largest global norm of the gradients, over all ranks, each
      parameter counted once; None does not clip.
    - ``zero``: the state that replicas shard instead of copying; stage NONE is plain data parallelism, in which
      ``bucketing`` and ``compression`` control the reduction of gradients.
    - ``precision`` None: bfloat16 with ``parallelism.enable_mixed_precision``, else the model's own.
    - ``loss_scaling`` None: dynamic in float16, none otherwise.
    - ``schedule`` None: the one that ``parallelism`` names; or another one for the same ranks and micro-batches.
    - ``offload_folder``: the folder for activations that do not fit; None: the system's folder for temporary files.
    """

    parallelism: ThreeDParallelismConfig
    micro_batches: int = 1
    rule: Rule = field(default_factory=AdamW)
    clip_norm: float | None = None
    zero: ZeROConfig = field(default_factory=lambda: ZeROConfig(stage=ZeROStage.NONE))
    precision: Precision | None = None
    loss_scaling: LossScaling | None = None
    bucketing: GradientBucketingConfig = field(default_factory=GradientBucketingConfig)
    compression: GradientCompressionConfig = field(default_factory=GradientCompressionConfig)
    schedule: Schedule | None = None
    offload_folder: Path | None = None

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise UsageError(f"micro_batches: expected 1 or more, got {self.micro_batches}")
        if self.clip_norm is not None and not self.clip_norm > 0.0:
            raise UsageError(f"clip_norm: expected a positive number or None, got {self.clip_norm}")
        if self.compression.is_enabled and self.zero.stage is not ZeROStage.NONE:
            raise UsageError(
                f"compression: expected none with {self.zero.stage}, which has zero.gradient_compression; "
                f"got {self.compression}"
            )
        if self.zero.stage is ZeROStage.NONE:
            self.zero.check_unused(_OF_SHARDS, "as bucketing and compression set how gradients travel in stage none")
        if not self.zero.average:
            raise UsageError("zero.average: expected True: replicas are averaged by tokens")
        schedule = self.schedule
        if schedule is not None:
            for name, expected, got in (
                ("num_stages", self.parallelism.pp_size, schedule.num_stages),
                ("num_microbatches", self.micro_batches, schedule.num_microbatches),
            ):
                if expected != got:
                    raise UsageError(f"schedule: expected {name} = {expected}, got {got}")

    @property
    def storage_precision(self) -> Precision:
        """The effective precision."""
        if self.precision is not None:
            return Precision(self.precision)
        return Precision.BFLOAT16 if self.parallelism.enable_mixed_precision else Precision.FULL

    @property
    def scaling(self) -> LossScaling:
        """The effective loss scaling."""
        if self.loss_scaling is not None:
            return self.loss_scaling
        return LossScaling() if self.storage_precision is Precision.FLOAT16 else NO_SCALING

    def make_schedule(self) -> Schedule:
        """Return the pipeline schedule of one step."""
        return schedule_of(self.parallelism, self.micro_batches) if self.schedule is None else self.schedule

    def settings(self) -> dict[str, object]:
        """Return the settings on which ranks must agree, by name."""
        return {
            "micro_batches": self.micro_batches,
            "rule": self.rule,
            "clip_norm": self.clip_norm,
            "zero": self.zero,
            "precision": self.storage_precision,
            "loss_scaling": self.scaling,
            "bucketing": self.bucketing,
            "compression": str(self.compression),
            "schedule": self.make_schedule().digest(),
        }
