"""Data parallelism: replicas in one process or one per rank, synchronous or not; ``local`` communicates more rarely.

Read ``distributed.py`` first, then ``averaging.py`` and ``rounds.py`` for the synchronous mode, ``gossip.py``,
``exchange.py`` and ``clock.py`` for the others; ``replica_training.py`` has those of ``DataParallel``.
"""

from asyncpar.parallel.config import DDP_GROUP, DDPConfig, SynchronizationMode
from asyncpar.parallel.data_parallel import DataParallel, ParallelSaved
from asyncpar.parallel.distributed import DistributedDataParallel
from asyncpar.parallel.module import Model, Module, OnGradient, Trainable
from asyncpar.parallel.process_group import (
    create_data_parallel,
    create_distributed_data_parallel,
    init_process_group,
)
from asyncpar.parallel.replica_training import Replica

__all__ = [
    "DDP_GROUP",
    "DDPConfig",
    "DataParallel",
    "DistributedDataParallel",
    "Model",
    "Module",
    "OnGradient",
    "ParallelSaved",
    "Replica",
    "SynchronizationMode",
    "Trainable",
    "create_data_parallel",
    "create_distributed_data_parallel",
    "init_process_group",
]
