"""Collective operations as values.  Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from asyncpar.collectives.reduction import Array


class ReductionOp(enum.StrEnum):
    """How values of ranks are combined."""

    SUM = "sum"
    AVERAGE = "average"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"

    @property
    def numeric(self) -> str:
        """What ``Communicator`` calls it."""
        return _NUMERIC.get(self.value, self.value)


_NUMERIC = {"average": "mean", "product": "prod"}


class CollectiveOp(enum.StrEnum):
    """What the ranks of a group do together.  ``Communicator`` has methods of the same names, which say what.

    SEND and RECV are of two ranks, which name each other as ``peer``.
    """

    ALL_REDUCE = "all_reduce"
    REDUCE = "reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    GATHER = "gather"
    SCATTER = "scatter"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all_to_all"
    SEND = "send"
    RECV = "recv"
    BARRIER = "barrier"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveResult:
    """What an operation came to on this rank.

    ``value`` is None for a barrier and for what is sent, and on the ranks that get nothing from a reduce or gather.
    ``codec`` names what the values went through on the wire (empty: they travelled as they are); ``seconds`` is what
    the call took.
    """

    operation: CollectiveOp
    group: str
    value: Array | None
    seconds: float
    codec: str = ""
