"""Collective operations as values, and their metrics.  Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from asyncpar.collectives.arrays import Array
from asyncpar.collectives.ledger import Traffic
from asyncpar.core.config.names import ReduceOp
from asyncpar.core.tables import bytes_text, html_table, seconds_text, text_table


class ReductionOp(enum.StrEnum):
    """The reductions."""

    SUM = "sum"
    AVERAGE = "average"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"

    @property
    def numeric(self) -> ReduceOp:
        """Its name in ``Communicator``."""
        return _NUMERIC[self.value]


_NUMERIC: dict[str, ReduceOp] = {"sum": "sum", "average": "mean", "min": "min", "max": "max", "product": "prod"}


class CollectiveOp(enum.StrEnum):
    """The collective operations.  ``Communicator`` has methods of the same names.

    SEND and RECV involve two ranks, which name each other as ``peer``.
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
    """The result of an operation on this rank.

    ``value`` is None for a barrier and a send, and on the ranks that get nothing from a reduce or gather.  ``codec``
    names the encoding of the values on the wire (empty: none); ``seconds`` is the duration of the call.
    """

    operation: CollectiveOp
    group: str
    value: Array | None
    seconds: float
    codec: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationMetrics:
    """Sums over the calls of one operation on this rank.

    ``count`` is the number of finished calls, ``bytes`` the payload that this rank sent for them, without headers,
    ``seconds`` the time from the first await of a call to its end.  ``errors`` are calls of ``collective_op`` that
    raised.
    """

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0
    errors: int = 0

    @property
    def total_bytes(self) -> int:
        """``bytes``."""
        return self.bytes

    @property
    def total_time(self) -> float:
        """``seconds``."""
        return self.seconds

    @property
    def avg_latency(self) -> float:
        """Mean ``seconds`` of a finished call; 0 before the first."""
        return self.seconds / self.count if self.count else 0.0

    def plus(self, other: OperationMetrics) -> OperationMetrics:
        """Return the sum of both."""
        return OperationMetrics(
            count=self.count + other.count,
            bytes=self.bytes + other.bytes,
            seconds=self.seconds + other.seconds,
            errors=self.errors + other.errors,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationMetrics:
    """Figures of the groups of a runtime so far, by the name of the operation."""

    operations: Mapping[str, OperationMetrics] = field(default_factory=dict)

    @property
    def total(self) -> OperationMetrics:
        """The sums over all operations."""
        total = OperationMetrics()
        for entry in self.operations.values():
            total = total.plus(entry)
        return total

    @property
    def operation_metrics(self) -> Mapping[str, OperationMetrics]:
        """``operations``."""
        return self.operations

    @property
    def operation_count(self) -> int:
        """Calls that finished, of all operations."""
        return self.total.count

    @property
    def total_bytes(self) -> int:
        """The payload that this rank sent, for all operations."""
        return self.total.bytes

    @property
    def total_time(self) -> float:
        """Seconds of all operations, added up."""
        return self.total.seconds

    @property
    def avg_bandwidth(self) -> float:
        """``total_bytes`` per second of ``total_time``; 0 before the first operation."""
        return self.total_bytes / self.total_time if self.total_time else 0.0

    def of(self, operation: str) -> OperationMetrics:
        """Return the figures of ``operation``, zeros if it was never called."""
        return self.operations.get(operation, OperationMetrics())

    def __str__(self) -> str:
        """Return a table of the figures, with units, rounded."""
        return text_table(self._rows(), left=1)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the same table for notebooks."""
        return html_table(self._rows())

    def _rows(self) -> list[tuple[str, ...]]:
        lines = [*sorted(self.operations.items()), ("all", self.total)]
        return [
            ("operation", "calls", "sent", "mean time", "errors"),
            *(
                (name, f"{one.count:,}", bytes_text(one.bytes), seconds_text(one.avg_latency), f"{one.errors:,}")
                for name, one in lines
            ),
        ]


@dataclass(slots=True, kw_only=True)
class CallTally:
    """Counts of a group: failures, and calls that consist of several operations."""

    errors: dict[str, int] = field(default_factory=dict)
    compressed: OperationMetrics = OperationMetrics()

    def failed(self, operation: str) -> None:
        """Count a call of ``operation`` that raised."""
        self.errors[operation] = self.errors.get(operation, 0) + 1

    def compressed_done(self, seconds: float) -> None:
        """Count a compressed all-reduce."""
        self.compressed = replace(
            self.compressed, count=self.compressed.count + 1, seconds=self.compressed.seconds + seconds
        )


def metrics_of(traffic: Traffic, compressed: Traffic | None, tally: CallTally) -> CommunicationMetrics:
    """Return the metrics of a group from the counts of its communicators.

    ``compressed`` is the traffic of the exchanges that compressed all-reduces consist of.
    """
    entries = [
        (entry.operation, OperationMetrics(count=entry.calls, bytes=entry.payload_bytes, seconds=entry.seconds))
        for entry in traffic.operations
    ]
    if compressed is not None:
        entries.append(("all_reduce", replace(tally.compressed, bytes=compressed.payload_bytes)))
    entries += [(operation, OperationMetrics(errors=count)) for operation, count in tally.errors.items()]
    return _summed(entries)


def sum_metrics(parts: Iterable[CommunicationMetrics]) -> CommunicationMetrics:
    """Return the sums over ``parts``, operation by operation."""
    return _summed(entry for part in parts for entry in part.operations.items())


def _summed(entries: Iterable[tuple[str, OperationMetrics]]) -> CommunicationMetrics:
    sums: dict[str, OperationMetrics] = {}
    for operation, entry in entries:
        sums[operation] = sums.get(operation, OperationMetrics()).plus(entry)
    return CommunicationMetrics(operations=sums)
