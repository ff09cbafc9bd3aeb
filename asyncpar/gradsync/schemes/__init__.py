"""Replace a bucket by its mean over replicas: one scheme for each kind of codec.  Start with ``scheme.py``."""

from asyncpar.gradsync.schemes.relayed import Copies, CopyHolders, Hosted
from asyncpar.gradsync.schemes.rounds import Rounds
from asyncpar.gradsync.schemes.scheme import (
    PAIR,
    Empty,
    Pair,
    Place,
    ReductionStep,
    Scheme,
    SchemeMemory,
    ShardedReduce,
)
from asyncpar.gradsync.schemes.summed import Alone, Exact, Summed, headroom

__all__ = [
    "PAIR",
    "Alone",
    "Copies",
    "CopyHolders",
    "Empty",
    "Exact",
    "Hosted",
    "Pair",
    "Place",
    "ReductionStep",
    "Rounds",
    "Scheme",
    "SchemeMemory",
    "ShardedReduce",
    "Summed",
    "headroom",
]
