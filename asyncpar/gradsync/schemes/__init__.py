"""How a bucket becomes its mean over replicas: a scheme for every kind of codec.  Start with ``scheme.py``."""

from asyncpar.gradsync.schemes.copies import Copies, CopyHolders
from asyncpar.gradsync.schemes.exact import Alone, Exact
from asyncpar.gradsync.schemes.hosted import Hosted
from asyncpar.gradsync.schemes.memory import Empty, Memory
from asyncpar.gradsync.schemes.owners import Owners
from asyncpar.gradsync.schemes.pair import PAIR, Pair
from asyncpar.gradsync.schemes.rounds import Rounds
from asyncpar.gradsync.schemes.scheme import Leg, Place, Scheme
from asyncpar.gradsync.schemes.summed import Summed, headroom

__all__ = [
    "PAIR",
    "Alone",
    "Copies",
    "CopyHolders",
    "Empty",
    "Exact",
    "Hosted",
    "Leg",
    "Memory",
    "Owners",
    "Pair",
    "Place",
    "Rounds",
    "Scheme",
    "Summed",
    "headroom",
]
