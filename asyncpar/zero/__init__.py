"""ZeRO: states, gradients and parameters sharded over the replicas of data parallelism.

Read ``partition.py`` first (the owners of values), then ``engine.py``.
"""

from asyncpar.core.config.strategies import ZeROStage
from asyncpar.zero.config import ZeROConfig
from asyncpar.zero.engine import ZeroEngine
from asyncpar.zero.errors import MemoryExceeded, StepTorn
from asyncpar.zero.memory import ZeROMemoryStats, memory_reduction
from asyncpar.zero.optimizer import ZeROOptimizer
from asyncpar.zero.share import StatePiece

__all__ = [
    "MemoryExceeded",
    "StatePiece",
    "StepTorn",
    "ZeROConfig",
    "ZeROMemoryStats",
    "ZeROOptimizer",
    "ZeROStage",
    "ZeroEngine",
    "memory_reduction",
]
