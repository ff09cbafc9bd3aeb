"""Attention with some of the heads on each rank (Shoeybi et al. 2019)."""

from __future__ import annotations

from typing import Any

from asyncpar.core.config.slicing import TensorSlice
from asyncpar.errors import UsageError
from asyncpar.nn.attention import AttentionHeads, check_heads
from asyncpar.nn.linear import Linear
from asyncpar.nn.parameter import Array, Initializer
from asyncpar.nn.sequential import Sequential
from asyncpar.nn.tensor.linear import ColumnParallel, RowParallelLinear
from asyncpar.nn.tensor.region import TensorRegion


class ParallelAttention(Sequential):
    """``CausalSelfAttention`` with an equal number of heads on every rank.

    The projection is cut by columns, queries, keys and values each by heads, and the output by rows, so that everything
    in between stays on a rank.

    ``gain`` and ``output_gain`` scale the initial values of the first and the last weights.
    """

    def __init__(
        self,
        name: str,
        features: int,
        heads: int,
        *,
        region: TensorRegion,
        initializer: Initializer,
        gain: float = 1.0,
        output_gain: float = 1.0,
    ) -> None:
        check_heads(name, features, heads)
        check_equal_heads(name, heads, region.group.size)
        self.name = name
        self.features = features
        self._region = region
        start, stop = region.cut(name, "features", features)
        part = TensorSlice(
            global_shape=(features, 3 * features),
            view_shape=(features, 3, features),
            dim=2,
            start=start,
            stop=stop,
            local_shape=(features, 3 * (stop - start)),
        )
        project = Linear(
            f"{name}/project", features, 3 * features, initializer=initializer, gain=gain, has_bias=False, part=part
        )
        output = RowParallelLinear(
            f"{name}/output", features, features, region=region, initializer=initializer, gain=output_gain
        )
        mixing = AttentionHeads(name, heads // region.group.size, features // heads)
        super().__init__([ColumnParallel(project, region=region), mixing, output])

    def forward(self, x: Array) -> tuple[Array, list[Any]]:
        if x.ndim != 3:
            raise UsageError(f"{self.name}: expected shape (batch, length, {self.features}), got {x.shape}")
        return super().forward(x)


def check_equal_heads(name: str, heads: int, size: int) -> None:
    """Raise ``UsageError`` unless ``size`` divides ``heads``."""
    if heads % size:
        raise UsageError(f"{name}: expected heads that divide among {size} tensor-parallel ranks, got {heads}")
