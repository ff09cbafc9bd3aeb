"""The residual block of a transformer, cut over ranks."""

from __future__ import annotations

from asyncpar.nn.block import BlockOptions, Residual
from asyncpar.nn.normalization import LayerNorm
from asyncpar.nn.parameter import Initializer
from asyncpar.nn.sequential import Sequential
from asyncpar.nn.tensor.attention import ParallelAttention
from asyncpar.nn.tensor.mlp import ParallelMlp
from asyncpar.nn.tensor.region import TensorRegion


class ParallelBlock(Sequential):
    """``Block`` with attention and perceptron cut over ranks.

    Forward and backward cost two all-reduces of the activations each.  Normalization and dropout are done by every
    rank, or, with sequence parallelism, by each on its part of the sequence (Korthikanti et al. 2022).

    ``options`` are those of ``Block``.
    """

    def __init__(
        self,
        name: str,
        features: int,
        heads: int,
        *,
        region: TensorRegion,
        initializer: Initializer,
        options: BlockOptions | None = None,
    ) -> None:
        options = BlockOptions() if options is None else options
        gain, output_gain = options.gain, options.output_gain
        first_norm = LayerNorm(f"{name}/first_norm", features, initializer=initializer, placement=region.placement)
        attention = ParallelAttention(
            f"{name}/attention",
            features,
            heads,
            region=region,
            initializer=initializer,
            gain=gain,
            output_gain=output_gain,
        )
        second_norm = LayerNorm(f"{name}/second_norm", features, initializer=initializer, placement=region.placement)
        mlp = ParallelMlp(
            f"{name}/mlp",
            features,
            options.hidden_of(features),
            region=region,
            initializer=initializer,
            gain=gain,
            output_gain=output_gain,
        )
        first = Sequential([first_norm, attention, *options.dropout(f"{name}/first_dropout")])
        second = Sequential([second_norm, mlp, *options.dropout(f"{name}/second_dropout")])
        super().__init__([Residual(first), Residual(second)])
