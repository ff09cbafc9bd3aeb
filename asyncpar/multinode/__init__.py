"""Data-parallel training on several nodes, gradients reduced inside each node first.  Start with ``trainer.py``."""

from asyncpar.gradsync import HostGroups
from asyncpar.multinode.config import MultiNodeConfig
from asyncpar.multinode.gradient_buffer import GradientSyncBuffer
from asyncpar.multinode.statistics import CompressionInfo, MemorySavings, MultiNodeStats
from asyncpar.multinode.trainer import MultiNodeTrainer
from asyncpar.zero.memory import MemoryUsage

__all__ = [
    "CompressionInfo",
    "GradientSyncBuffer",
    "HostGroups",
    "MemorySavings",
    "MemoryUsage",
    "MultiNodeConfig",
    "MultiNodeStats",
    "MultiNodeTrainer",
]
