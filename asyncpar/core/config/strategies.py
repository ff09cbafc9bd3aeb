"""Strategies for saving memory and for reducing gradients.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

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
