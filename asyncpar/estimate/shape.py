"""The shape of a transformer language model, its parameters and its arithmetic.  Pure."""

from __future__ import annotations

from dataclasses import dataclass

from asyncpar.config.checks import check_count
from asyncpar.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder with learned positions, attention and a two-layer perceptron in each layer, and a last normalization.

    The perceptron is ``ffn_multiple`` times as wide as ``hidden``.  ``is_tied``: the head is the embedding.
    ``has_query_bias``: queries, keys and values have biases, as in GPT; those of ``asyncpar.nn`` have none.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    ffn_multiple: int = 4
    is_tied: bool = True
    has_query_bias: bool = True

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocabulary", "sequence", "ffn_multiple"):
            check_count(name, getattr(self, name))
        if self.hidden % self.heads:
            raise UsageError(f"heads: expected a divisor of hidden = {self.hidden}, got {self.heads}")

    def layer_parameters(self, tp_size: int = 1) -> int:
        """Return the number of values of one layer on one of ``tp_size`` ranks, the one with most.

        Column-parallel weights and their biases and row-parallel weights are cut; norms and row-parallel biases are
        whole on each rank (Shoeybi et al., "Megatron-LM", 2019).  Whole: ``12 h^2 + 13 h`` for a multiple of 4.
        """
        hidden, wide = self.hidden, self.ffn_multiple * self.hidden
        heads = _largest_share(self.heads, tp_size) * (hidden // self.heads)
        query_bias = 3 * heads if self.has_query_bias else 0
        attention = hidden * 3 * heads + query_bias + heads * hidden + hidden
        share = _largest_share(wide, tp_size)
        perceptron = hidden * share + share + share * hidden + hidden
        return attention + perceptron + 2 * 2 * hidden

    def embedding_parameters(self, tp_size: int = 1) -> int:
        """Return the number of values of the token embedding (cut by vocabulary), or of a head, on one rank."""
        return _largest_share(self.vocabulary, tp_size) * self.hidden

    @property
    def position_parameters(self) -> int:
        """Number of values of the learned positions, which are whole on each rank."""
        return self.sequence * self.hidden

    @property
    def norm_parameters(self) -> int:
        """Number of values of the last normalization."""
        return 2 * self.hidden

    @property
    def parameters(self) -> int:
        """Number of values of the whole model."""
        embeddings = self.embedding_parameters() * (1 if self.is_tied else 2)
        return self.layers * self.layer_parameters() + embeddings + self.position_parameters + self.norm_parameters

    @property
    def published_parameters(self) -> int:
        """``12 l h^2 (1 + 13/(12 h) + (V + s)/(12 l h))`` for a GPT: ``parameters`` but for the last normalization.

        Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
        (2021), equation 2.  Its model is tied, has all biases and a multiple of 4.
        """
        layers, hidden = self.layers, self.hidden
        return 12 * layers * hidden**2 + 13 * layers * hidden + (self.vocabulary + self.sequence) * hidden

    @property
    def layer_flops(self) -> int:
        """Floating-point operations of the forward pass of one layer, for each token.

        Two for each value of a weight, ``8 h^2 + 4 h f``, and ``4 s h`` for attention; ``24 h^2 + 4 s h`` for a
        multiple of 4.  Source: Narayanan et al. (2021), appendix.  A backward pass takes twice as many.
        """
        return 8 * self.hidden**2 + 4 * self.ffn_multiple * self.hidden**2 + 4 * self.sequence * self.hidden

    @property
    def head_flops(self) -> int:
        """Floating-point operations of the forward pass of the head, for each token: ``2 h V`` (same source)."""
        return 2 * self.hidden * self.vocabulary


def _largest_share(length: int, parts: int) -> int:
    """Return the largest of ``parts`` lengths that differ by one at most."""
    return -(-length // parts)
