"""Numpy layers with explicit backward: small, exact, enough to train a transformer without further dependencies.

Read ``stage.py`` first, then ``linear.py`` as the simplest example, then ``transformer.py``.  Optimizers are in
``asyncpar.nn.optimizers``.
"""

from asyncpar.nn.attention import CausalSelfAttention
from asyncpar.nn.block import Block, BlockOptions
from asyncpar.nn.dropout import Dropout
from asyncpar.nn.embedding import Embedding
from asyncpar.nn.linear import Linear, TiedLinear
from asyncpar.nn.loss import softmax_cross_entropy
from asyncpar.nn.mlp import Mlp
from asyncpar.nn.normalization import LayerNorm
from asyncpar.nn.parameter import Array, Initializer, OnGradient, Parameter
from asyncpar.nn.schedule import WarmupCosine
from asyncpar.nn.sequential import Sequential
from asyncpar.nn.stage import Deferred, Stage
from asyncpar.nn.transformer import Transformer, TransformerConfig

__all__ = [
    "Array",
    "Block",
    "BlockOptions",
    "CausalSelfAttention",
    "Deferred",
    "Dropout",
    "Embedding",
    "Initializer",
    "LayerNorm",
    "Linear",
    "Mlp",
    "OnGradient",
    "Parameter",
    "Sequential",
    "Stage",
    "TiedLinear",
    "Transformer",
    "TransformerConfig",
    "WarmupCosine",
    "softmax_cross_entropy",
]
