"""Tensor parallelism: layers that are split over the ranks of a group.

Read ``region.py`` first, then ``linear.py``.  Parameters have the names and initial values of the whole layers in
``asyncpar.nn``; assembled by their ``slice``, the parts of all ranks equal them to the last bit.
"""

from asyncpar.nn.tensor.attention import ParallelAttention
from asyncpar.nn.tensor.block import ParallelBlock
from asyncpar.nn.tensor.embedding import VocabParallelEmbedding
from asyncpar.nn.tensor.group import BridgedGroup, SingleRankGroup, TensorGroup
from asyncpar.nn.tensor.linear import ColumnParallel, ColumnParallelLinear, RowParallelLinear
from asyncpar.nn.tensor.loss import vocab_parallel_cross_entropy
from asyncpar.nn.tensor.mlp import ParallelMlp
from asyncpar.nn.tensor.region import TensorRegion
from asyncpar.nn.tensor.transformer import TransformerStage, build_stage

__all__ = [
    "BridgedGroup",
    "ColumnParallel",
    "ColumnParallelLinear",
    "ParallelAttention",
    "ParallelBlock",
    "ParallelMlp",
    "RowParallelLinear",
    "SingleRankGroup",
    "TensorGroup",
    "TensorRegion",
    "TransformerStage",
    "VocabParallelEmbedding",
    "build_stage",
    "vocab_parallel_cross_entropy",
]
