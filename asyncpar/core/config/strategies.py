"""Strategies for saving memory and for reducing gradients, and stages of sharding.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from asyncpar.errors import UsageError

_MEGABYTES_PER_LAYER = 1024.0


class MemoryOptimizationStrategy(StrEnum):
    """Strategies for the activations kept between forward and backward."""

    BASIC = "basic"
    STANDARD = "standard"
    AGGRESSIVE = "aggressive"
    EXTREME = "extreme"


class CommunicationStrategy(StrEnum):
    """Methods of reducing gradients."""

    ALL_REDUCE = "all_reduce"
    HIERARCHICAL_ALL_REDUCE = "hierarchical_all_reduce"
    RING_ALL_REDUCE = "ring_all_reduce"
    TREE_ALL_REDUCE = "tree_all_reduce"
    ADAPTIVE = "adaptive"


_ACTIVATION_FACTOR: Mapping[MemoryOptimizationStrategy, float] = MappingProxyType(
    {
        MemoryOptimizationStrategy.BASIC: 2.0,
        MemoryOptimizationStrategy.STANDARD: 1.5,
        MemoryOptimizationStrategy.AGGRESSIVE: 1.2,
        MemoryOptimizationStrategy.EXTREME: 1.0,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequirements:
    """Memory that one rank needs, in MiB; ``communication_memory_mb`` is that of buckets and gathered values."""

    model_memory_mb: float
    activation_memory_mb: float
    optimizer_memory_mb: float
    communication_memory_mb: float = 0.0

    @property
    def total_memory_mb(self) -> float:
        """The sum of all parts."""
        kept = self.model_memory_mb + self.optimizer_memory_mb
        return kept + self.activation_memory_mb + self.communication_memory_mb


def rough_requirements(layers: int, tp_size: int, strategy: MemoryOptimizationStrategy) -> MemoryRequirements:
    """Return the memory of a stage of ``layers`` by a rule of thumb.

    1,024 MiB per layer over ``tp_size``; activations 2.0, 1.5, 1.2 or 1.0 times that by strategy; optimizer twice.
    """
    model = _MEGABYTES_PER_LAYER * layers / tp_size
    return MemoryRequirements(
        model_memory_mb=model,
        activation_memory_mb=model * _ACTIVATION_FACTOR[strategy],
        optimizer_memory_mb=model * 2.0,
    )


class ZeROStage(StrEnum):
    """Stages of sharding over replicas (Rajbhandari et al. 2020): each also shards what the previous one does.

    NONE: nothing (plain data parallelism).  STAGE1: optimizer states and master values.  STAGE2: gradients.  STAGE3:
    parameters.
    """

    NONE = "none"
    STAGE1 = "stage1"
    STAGE2 = "stage2"
    STAGE3 = "stage3"

    @classmethod
    def of(cls, number: int) -> ZeROStage:
        """Return the stage with that number, 0 to 3."""
        stages = list(cls)
        if isinstance(number, bool) or number not in range(len(stages)):
            raise UsageError(f"stage: expected 0 to {len(stages) - 1}, got {number!r}")
        return stages[number]

    @property
    def number(self) -> int:
        """0 to 3."""
        return list(ZeROStage).index(self)

    @property
    def shards_states(self) -> bool:
        return self.number >= 1

    @property
    def shards_gradients(self) -> bool:
        return self.number >= 2

    @property
    def shards_parameters(self) -> bool:
        return self.number >= 3
