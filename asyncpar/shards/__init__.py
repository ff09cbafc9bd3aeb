"""A model in pieces: the layers of each pipeline stage, cut over tensor-parallel ranks.  Pure: arrays and no messages.

Read ``layer.py``, then ``plan.py``, then ``model.py``.
"""

from asyncpar.shards.layer import LayerShard, LayerType, ShardParameter, ShardStrategy
from asyncpar.shards.model import ModelShards
from asyncpar.shards.plan import (
    CommunicationPattern,
    LayerTensorParallelPlan,
    TensorParallelShardingPlan,
    create_tp_sharding_plan,
    split_sizes,
)

__all__ = [
    "CommunicationPattern",
    "LayerShard",
    "LayerTensorParallelPlan",
    "LayerType",
    "ModelShards",
    "ShardParameter",
    "ShardStrategy",
    "TensorParallelShardingPlan",
    "create_tp_sharding_plan",
    "split_sizes",
]
