"""Bytes of activations that a rank keeps between forward and backward.  Pure.

Source of the formulas: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022),
section 4.  They count dropout, whose masks take one byte each, and half-precision values; here a value may take
``value_bytes``, and with 2 the figures are theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from asyncpar.core.config.checks import check_count
from asyncpar.core.config.parallel import MemoryOptimizationStrategy, ThreeDParallelismConfig
from asyncpar.estimate.job import ModelShape

_LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationModel:
    """The activations of a micro-batch of ``micro_batch_size`` sequences on one of ``tp_size`` tensor-parallel ranks.

    With ``sequence_parallel`` norms and dropouts are cut along the sequence, so nothing is kept whole.

    ``value_bytes`` is the size of each value.
    """

    shape: ModelShape
    micro_batch_size: int = 1
    tp_size: int = 1
    sequence_parallel: bool = False
    value_bytes: int = 2

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "tp_size", "value_bytes"):
            check_count(name, getattr(self, name))

    @classmethod
    def of(
        cls, shape: ModelShape, config: ThreeDParallelismConfig, *, value_bytes: int, sequence_parallel: bool
    ) -> Self:
        """Return the model of one rank of ``config``."""
        return cls(
            shape=shape,
            micro_batch_size=config.micro_batch_size,
            tp_size=config.tp_size,
            sequence_parallel=sequence_parallel,
            value_bytes=value_bytes,
        )

    @property
    def positions(self) -> int:
        """``s b h``: the number of values between two layers."""
        return self.shape.sequence * self.micro_batch_size * self.shape.hidden

    @property
    def layer(self) -> float:
        """Bytes kept of one layer: ``s b h (10 + 24/t + 5 a s/(h t))`` at two bytes per value; 34 + 5 a s/h for one.

        Whole on each rank are inputs of norms, attention and perceptron (4 values) and two masks; cut are 12 values
        inside of attention and perceptron, and two values and a mask for each score.  With ``sequence_parallel``
        everything is cut: ``s b h/t (34 + 5 a s/h)``.
        """
        values, size = self.positions, self.value_bytes
        whole = values * (4 * size + 2)
        cut = values * 12 * size
        scores = self.shape.heads * self.shape.sequence**2 * self.micro_batch_size * (2 * size + 1)
        return (cut + scores) / self.tp_size + whole / self._cut_of_whole

    @property
    def recomputed_layer(self) -> float:
        """Bytes kept of a layer that is recomputed before its backward pass: its input, ``2 s b h``."""
        return self.positions * self.value_bytes / self._cut_of_whole

    @property
    def input_end(self) -> float:
        """Bytes kept of the embedding: the mask of its dropout."""
        return self.positions / self._cut_of_whole

    @property
    def output_end(self) -> float:
        """Bytes kept after the last layer: inputs of norm and head, and logits in single precision.

        ``4 s b h (1 + V/h)`` at two bytes per value, the logits cut by vocabulary.
        """
        tokens = self.shape.sequence * self.micro_batch_size
        logits = tokens * -(-self.shape.vocabulary // self.tp_size) * _LOGIT_BYTES
        return 2 * self.positions * self.value_bytes / self._cut_of_whole + logits

    def layers(self, count: int, kept: int) -> float:
        """Return the bytes kept of ``count`` layers, of which ``kept`` are not recomputed."""
        return kept * self.layer + (count - kept) * self.recomputed_layer

    @property
    def _cut_of_whole(self) -> int:
        return self.tp_size if self.sequence_parallel else 1


def kept_layers(strategy: MemoryOptimizationStrategy, layers: int, *, recompute_all: bool = False) -> int:
    """Return how many of ``layers`` consecutive layers are not recomputed.

    BASIC: all; STANDARD: every second; AGGRESSIVE and EXTREME: every fourth.

    With ``recompute_all`` it is none, whatever the strategy.
    """
    if recompute_all:
        return 0
    match strategy:
        case MemoryOptimizationStrategy.BASIC:
            return layers
        case MemoryOptimizationStrategy.STANDARD:
            return -(-layers // 2)
        case MemoryOptimizationStrategy.AGGRESSIVE | MemoryOptimizationStrategy.EXTREME:
            return -(-layers // 4)
