"""A decoder-only transformer language model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncpar.core.array_pool import ArrayPool
from asyncpar.errors import UsageError
from asyncpar.nn.block import Block, BlockOptions, MakeDropout
from asyncpar.nn.dropout import Dropout
from asyncpar.nn.embedding import Embedding, Tokens
from asyncpar.nn.linear import Linear, Projection, TiedLinear
from asyncpar.nn.normalization import LayerNorm
from asyncpar.nn.parameter import Array, Initializer
from asyncpar.nn.sequential import Sequential
from asyncpar.nn.stage import check_positive

_GAIN = 0.5
_EMBEDDING_STD = 0.1

HEAD_GAIN = 0.25
"""Gain of the initial values of the head's weight."""

TIED = "embedding/tokens"
"""The name of the parameter that is both token table and head, if they are tied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """The shape of a model and the seed of its initial values.

    With ``tied_embeddings`` the head is the token table, transposed.  ``dropout`` is the fraction of values dropped
    from the embedding and from the term that each half of a block adds.  ``mlp_hidden`` is the width of the
    perceptrons, by default four times the features.

    ``vocabulary`` is the number of tokens, ``length`` the longest sequence, ``layers`` the number of blocks, ``heads``
    that of attention heads in each, and ``dtype`` that of parameters and activations.
    """

    vocabulary: int = 256
    length: int = 128
    features: int = 128
    layers: int = 2
    heads: int = 4
    seed: int = 0
    dtype: str = "float32"
    tied_embeddings: bool = False
    dropout: float = 0.0
    mlp_hidden: int | None = None

    def __post_init__(self) -> None:
        sizes = {"vocabulary": self.vocabulary, "length": self.length, "features": self.features}
        check_positive("transformer", **sizes, layers=self.layers, heads=self.heads, mlp_hidden=self.hidden)
        if self.features % self.heads:
            raise UsageError(f"heads: expected a divisor of {self.features} features, got {self.heads}")
        if self.dtype not in ("float32", "float64"):
            raise UsageError(f"dtype: expected float32 or float64, got {self.dtype}")
        if not 0.0 <= self.dropout < 1.0:
            raise UsageError(f"dropout: expected 0 <= dropout < 1, got {self.dropout}")

    @property
    def hidden(self) -> int:
        """Width of the perceptrons."""
        return 4 * self.features if self.mlp_hidden is None else self.mlp_hidden

    @property
    def embedding_std(self) -> float:
        """Standard deviation of the embedding's initial values: a tied table starts as small as a head."""
        return HEAD_GAIN / math.sqrt(self.features) if self.tied_embeddings else _EMBEDDING_STD

    def initializer(self) -> Initializer:
        """Return the initializer of the values."""
        return Initializer.from_seed(self.seed, self.dtype)

    def block_options(self, make_dropout: MakeDropout | None) -> BlockOptions:
        """Return the options of blocks beyond their size."""
        output_gain = _GAIN / math.sqrt(2 * self.layers)
        return BlockOptions(hidden=self.hidden, gain=_GAIN, output_gain=output_gain, make_dropout=make_dropout)

    def dropout_layer(self, name: str, *, replica: int = 0, part: int = 0) -> Dropout:
        """Return the dropout layer of a name.

        Its choices depend on the seed, its name, the data-parallel ``replica``, and its ``part`` of the sequence; not
        on the distribution of layers over ranks.
        """
        mixed = np.random.SeedSequence([self.seed, replica, part]).generate_state(1, np.uint64)
        return Dropout(name, self.dropout, seed=int(mixed[0]))


class Transformer(Sequential):
    """Embedding, blocks, a last normalization, and a linear head to one logit per token of the vocabulary.

    Weights that write into the residual stream start scaled down by the square root of their number (Radford et al.
    2019).  All weights start small enough to learn fast, and large enough that the first steps do not amplify rounding:
    runs that differ only in the order of sums stay within 1e-6 of each other for hundreds of steps in float32.  Two
    models of one configuration are equal to the last bit.
    """

    def __init__(self, config: TransformerConfig, initializer: Initializer | None = None) -> None:
        """``initializer``, a new one of the configuration's seed, creates other parameters (``nn.half``)."""
        self.config = config
        initializer = initializer or config.initializer()
        embedding = Embedding(
            "embedding",
            config.vocabulary,
            config.features,
            max_length=config.length,
            initializer=initializer,
            std=config.embedding_std,
        )
        self._dropouts: list[Dropout] = []
        options = config.block_options(self._make_dropout if config.dropout else None)
        blocks = [
            Block(f"block{i}", config.features, config.heads, initializer=initializer, options=options)
            for i in range(config.layers)
        ]
        norm = LayerNorm("norm", config.features, initializer=initializer)
        head = self._head(embedding, initializer)
        super().__init__([embedding, *options.dropout("embedding/dropout"), *blocks, norm, head])
        self.use_memory(ArrayPool(None))

    @property
    def parameter_count(self) -> int:
        """Number of trainable values."""
        return sum(parameter.size for parameter in self.parameters())

    def forward(self, x: Tokens) -> tuple[Array, list[Any]]:
        return super().forward(np.asarray(x))

    def set_training(self, is_training: bool) -> None:
        """Switch dropout on, as it is initially, or off."""
        set_training(self._dropouts, is_training)

    def _make_dropout(self, name: str) -> Dropout:
        self._dropouts.append(self.config.dropout_layer(name))
        return self._dropouts[-1]

    def _head(self, embedding: Embedding, initializer: Initializer) -> Projection:
        config = self.config
        if config.tied_embeddings:
            return TiedLinear("head", embedding.tokens, reports=False)
        return Linear(
            "head", config.features, config.vocabulary, initializer=initializer, gain=HEAD_GAIN, has_bias=False
        )


def set_training(dropouts: Iterable[Dropout], is_training: bool) -> None:
    """Switch dropout layers on or off."""
    for dropout in dropouts:
        dropout.is_training = is_training
