"""The perceptron with some of the hidden values on each rank (Shoeybi et al. 2019)."""

from __future__ import annotations

from asyncpar.nn.mlp import Gelu
from asyncpar.nn.parameter import Initializer
from asyncpar.nn.sequential import Sequential
from asyncpar.nn.tensor.linear import ColumnParallelLinear, RowParallelLinear
from asyncpar.nn.tensor.region import TensorRegion


class ParallelMlp(Sequential):
    """``Mlp`` with ``hidden`` cut by ``split_bounds``: the first layer by columns, the second by rows.

    ``gain`` and ``output_gain`` scale the initial values of the first and the last weights.
    """

    def __init__(
        self,
        name: str,
        features: int,
        hidden: int,
        *,
        region: TensorRegion,
        initializer: Initializer,
        gain: float = 1.0,
        output_gain: float = 1.0,
    ) -> None:
        self.name = name
        widen = ColumnParallelLinear(
            f"{name}/widen", features, hidden, region=region, initializer=initializer, gain=gain
        )
        narrow = RowParallelLinear(
            f"{name}/narrow", hidden, features, region=region, initializer=initializer, gain=output_gain
        )
        super().__init__([widen, Gelu(f"{name}/gelu"), narrow])
