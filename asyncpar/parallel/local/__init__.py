"""Training that communicates every H steps: local SGD, DiLoCo, and both between hosts.

Read ``outer.py``, which computes, then ``rounds.py``, which communicates; ``hosts.py`` puts hosts in the place of
ranks.
"""

from asyncpar.parallel.local.hosts import HostSynchronizer
from asyncpar.parallel.local.outer import HasValue, OuterConfig, OuterOptimizer, OuterState
from asyncpar.parallel.local.rounds import DiLoCo, LocalSGD, LocalState, Synchronizer

__all__ = [
    "DiLoCo",
    "HasValue",
    "HostSynchronizer",
    "LocalSGD",
    "LocalState",
    "OuterConfig",
    "OuterOptimizer",
    "OuterState",
    "Synchronizer",
]
