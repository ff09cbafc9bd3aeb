"""Statistics of finished operations: bytes, messages, and times."""

from __future__ import annotations

from asyncpar.core.records import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveStatistics:
    """Sums over the finished calls of one operation by one algorithm, on one rank.

    ``payload_bytes`` and ``messages`` are what this rank sent, without headers; ``steps`` the rounds of messages it
    took part in (one per piece and round); ``seconds`` from the first await of a call to its end.
    """

    operation: str
    algorithm: str
    calls: int = 0
    payload_bytes: int = 0
    messages: int = 0
    steps: int = 0
    seconds: float = 0.0


LARGE_CALL_BYTES = 64 << 10
"""The time of calls that send less depends on latency more than on bandwidth: their rate is that of all together."""


@dataclass(slots=True)
class Tally:
    """The running sums behind one ``CollectiveStatistics``; ``fastest`` is in bytes/s, of a call of 64 KiB or more."""

    calls: int = 0
    payload_bytes: int = 0
    messages: int = 0
    steps: int = 0
    seconds: float = 0.0
    fastest: float = 0.0

    @property
    def rate(self) -> float:
        """Bytes/s that this rank was seen to send: in the fastest large call, else in all calls; 0 before any."""
        if self.fastest or self.seconds <= 0.0:
            return self.fastest
        return self.payload_bytes / self.seconds

    def snapshot(self, operation: str, algorithm: str) -> CollectiveStatistics:
        """Return the sums as they are now."""
        return CollectiveStatistics(
            operation=operation,
            algorithm=algorithm,
            calls=self.calls,
            payload_bytes=self.payload_bytes,
            messages=self.messages,
            steps=self.steps,
            seconds=self.seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """All statistics of a communicator at one moment."""

    operations: tuple[CollectiveStatistics, ...]

    @property
    def payload_bytes(self) -> int:
        """Payload bytes sent by all operations."""
        return sum(entry.payload_bytes for entry in self.operations)

    @property
    def messages(self) -> int:
        """Messages sent by all operations."""
        return sum(entry.messages for entry in self.operations)

    def of(self, operation: str, algorithm: str | None = None) -> CollectiveStatistics:
        """Return the statistics of ``operation``, by one algorithm or by all together."""
        chosen = [
            entry for entry in self.operations if entry.operation == operation and algorithm in (None, entry.algorithm)
        ]
        return CollectiveStatistics(
            operation=operation,
            algorithm=algorithm or "all",
            calls=sum(entry.calls for entry in chosen),
            payload_bytes=sum(entry.payload_bytes for entry in chosen),
            messages=sum(entry.messages for entry in chosen),
            steps=sum(entry.steps for entry in chosen),
            seconds=sum(entry.seconds for entry in chosen),
        )
