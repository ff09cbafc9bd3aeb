"""One layer on one rank: its tensors, their gradients, and which of them other ranks hold, too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncpar.core.config.placement import Placement, Replication
from asyncpar.errors import UsageError

Array: TypeAlias = NDArray[np.floating[Any]]


class LayerType(StrEnum):
    """The computation of a layer."""

    LINEAR = "linear"
    ATTENTION = "attention"
    MLP = "mlp"
    EMBEDDING = "embedding"


class ShardStrategy(StrEnum):
    """Partitions of a layer's weight, (inputs, outputs) or (vocabulary, hidden), over tensor-parallel ranks.

    COLUMN_PARALLEL: each rank has some of the outputs, with their biases; a subsequent down projection is cut by its
    inputs.  ROW_PARALLEL: each has some of the inputs, and the whole bias.  VOCAB_PARALLEL: each has some rows of an
    embedding's table.  REPLICATED: each has everything, for example of norms.
    """

    COLUMN_PARALLEL = "column_parallel"
    ROW_PARALLEL = "row_parallel"
    VOCAB_PARALLEL = "vocab_parallel"
    REPLICATED = "replicated"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardParameter:
    """One tensor of a layer, for gradient synchronization and optimizers."""

    name: str
    value: Array
    grad: Array
    placement: Placement


@dataclass(slots=True, kw_only=True, eq=False)
class LayerShard:
    """This rank's part of one layer.

    Values stay the same arrays for life, of floating dtype; each has a gradient of its shape and dtype, initially zero.
    ``down_projection_weight``, of shape (outputs, hidden), belongs to the second linear map of an MLP or of attention.
    Without ``strategy`` it follows from the type: embeddings are vocabulary-parallel, weights of fewer than two
    dimensions (norms) replicated, others column-parallel.

    ``replication`` describes the gradients of a replicated tensor on tensor-parallel ranks: WHOLE normally, PARTIAL if
    each rank saw a part of the sequence.  ``is_tied`` marks a weight that the first and the last stage share.

    ``bias`` is this rank's part of the output bias, if any.
    """

    layer_id: int
    layer_type: LayerType
    weight: Array
    bias: Array | None = None
    down_projection_weight: Array | None = None
    strategy: ShardStrategy | None = None
    replication: Replication = Replication.WHOLE
    is_tied: bool = False
    grad_weight: Array = field(init=False, repr=False)
    grad_bias: Array | None = field(init=False, repr=False)
    grad_down_projection: Array | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.layer_id < 0:
            raise UsageError(f"layer_id: expected 0 or more, got {self.layer_id}")
        for tensor, value in self._values():
            if value is not None and not np.issubdtype(value.dtype, np.floating):
                raise UsageError(f"{self.name_of(tensor)}: expected a floating dtype, got {value.dtype}")
        self._check_down_projection()
        self.grad_weight = np.zeros_like(self.weight)
        self.grad_bias = None if self.bias is None else np.zeros_like(self.bias)
        down = self.down_projection_weight
        self.grad_down_projection = None if down is None else np.zeros_like(down)

    @property
    def effective_strategy(self) -> ShardStrategy:
        """The given strategy, or else that of the layer's type."""
        if self.strategy is not None:
            return self.strategy
        if self.layer_type is LayerType.EMBEDDING:
            return ShardStrategy.VOCAB_PARALLEL
        return ShardStrategy.REPLICATED if self.weight.ndim < 2 else ShardStrategy.COLUMN_PARALLEL

    @property
    def parameter_count(self) -> int:
        """Number of values on this rank, without gradients."""
        return sum(parameter.value.size for parameter in self.parameters())

    @property
    def nbytes(self) -> int:
        """Bytes of values and gradients."""
        return sum(parameter.value.nbytes + parameter.grad.nbytes for parameter in self.parameters())

    def parameters(self) -> Iterator[ShardParameter]:
        """Yield weight, bias and down projection, if present."""
        yield self._parameter("weight", self.weight, self.grad_weight)
        if self.bias is not None and self.grad_bias is not None:
            yield self._parameter("bias", self.bias, self.grad_bias)
        if self.down_projection_weight is not None and self.grad_down_projection is not None:
            yield self._parameter("down_projection", self.down_projection_weight, self.grad_down_projection)

    def name_of(self, tensor: str) -> str:
        """Return the name of ``weight``, ``bias`` or ``down_projection`` in the model."""
        return f"layer_{self.layer_id}_{tensor}"

    def _values(self) -> tuple[tuple[str, Array | None], ...]:
        return ("weight", self.weight), ("bias", self.bias), ("down_projection", self.down_projection_weight)

    def _parameter(self, tensor: str, value: Array, grad: Array) -> ShardParameter:
        placement = Placement(
            replicated=self.replication if self._is_replicated(tensor) else None,
            tied="embedding" if self.is_tied and tensor == "weight" else None,
        )
        return ShardParameter(name=self.name_of(tensor), value=value, grad=grad, placement=placement)

    def _is_replicated(self, tensor: str) -> bool:
        match self.effective_strategy:
            case ShardStrategy.REPLICATED:
                return True
            case ShardStrategy.ROW_PARALLEL | ShardStrategy.VOCAB_PARALLEL:
                return tensor == "bias"
            case ShardStrategy.COLUMN_PARALLEL:
                return False

    def _check_down_projection(self) -> None:
        """Check that a down projection takes whole multiples of column-parallel outputs (queries, keys, values)."""
        down, strategy = self.down_projection_weight, self.effective_strategy
        if down is None:
            return
        name = self.name_of("down_projection")
        if strategy not in (ShardStrategy.COLUMN_PARALLEL, ShardStrategy.REPLICATED):
            raise UsageError(f"{name}: expected none in a {strategy} layer, got one of shape {list(down.shape)}")
        if down.ndim != 2 or self.weight.ndim != 2 or not down.shape[0] or self.weight.shape[1] % down.shape[0]:
            raise UsageError(
                f"{name}: expected 2 dimensions, the first a divisor of the weight's outputs, "
                f"got {list(down.shape)} after a weight of {list(self.weight.shape)}"
            )
