"""What a step sent, read off the communicators' counters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from asyncpar.collectives.communicator import Communicator


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncTraffic:
    """Payload bytes and messages that this rank sent, and rounds of messages that it took part in.

    ``bandwidth`` is the most, in bytes/s, that it was measured to send; 0 where it has sent nothing.
    """

    payload_bytes: int = 0
    messages: int = 0
    steps: int = 0
    bandwidth: float = 0.0

    @classmethod
    def read(cls, communicators: Iterable[Communicator]) -> SyncTraffic:
        """Return the sums over all operations of ``communicators`` so far."""
        read = [(communicator, communicator.traffic) for communicator in communicators]
        entries = [entry for _, traffic in read for entry in traffic.operations]
        return cls(
            bandwidth=max((one.bandwidth for one, traffic in read if traffic.payload_bytes), default=0.0),
            payload_bytes=sum(entry.payload_bytes for entry in entries),
            messages=sum(entry.messages for entry in entries),
            steps=sum(entry.steps for entry in entries),
        )

    def __sub__(self, earlier: SyncTraffic) -> SyncTraffic:
        """Return what came after ``earlier``, with the bandwidth known by now."""
        return SyncTraffic(
            bandwidth=self.bandwidth,
            payload_bytes=self.payload_bytes - earlier.payload_bytes,
            messages=self.messages - earlier.messages,
            steps=self.steps - earlier.steps,
        )
