"""What a step sent, read off the communicators' counters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from asyncpar.collectives.communicator import Communicator


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncTraffic:
    """Payload bytes and messages that this rank sent, and rounds of messages that it took part in."""

    payload_bytes: int = 0
    messages: int = 0
    steps: int = 0

    @classmethod
    def read(cls, communicators: Iterable[Communicator]) -> SyncTraffic:
        """Return the sums over all operations of ``communicators`` so far."""
        entries = [entry for communicator in communicators for entry in communicator.traffic.operations]
        return cls(
            payload_bytes=sum(entry.payload_bytes for entry in entries),
            messages=sum(entry.messages for entry in entries),
            steps=sum(entry.steps for entry in entries),
        )

    def __sub__(self, earlier: SyncTraffic) -> SyncTraffic:
        """Return what came after ``earlier``."""
        return SyncTraffic(
            payload_bytes=self.payload_bytes - earlier.payload_bytes,
            messages=self.messages - earlier.messages,
            steps=self.steps - earlier.steps,
        )
