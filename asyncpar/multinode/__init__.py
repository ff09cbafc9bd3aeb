"""Data-parallel training on several nodes, gradients reduced inside each node first.  Start with ``trainer.py``."""

from asyncpar.multinode.config import MultiNodeConfig
from asyncpar.multinode.gradient_buffer import GradientSyncBuffer
from asyncpar.multinode.groups import NodeGroups
from asyncpar.multinode.statistics import CompressionInfo, MemoryUsage, MultiNodeStats
from asyncpar.multinode.trainer import MultiNodeTrainer

__all__ = [
    "CompressionInfo",
    "GradientSyncBuffer",
    "MemoryUsage",
    "MultiNodeConfig",
    "MultiNodeStats",
    "MultiNodeTrainer",
    "NodeGroups",
]
