"""What activations have taken of memory and disk.  Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """How often, and how many bytes."""

    count: int = 0
    nbytes: int = 0

    def plus(self, nbytes: int) -> Volume:
        """Return this and once more."""
        return Volume(count=self.count + 1, nbytes=self.nbytes + nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUsageStats:
    """Measured figures, in bytes of the arrays themselves, shared memory counted once.

    ``current_bytes`` and ``peak_bytes`` are in memory, ``current_count`` and ``peak_count`` held at all (in flight);
    ``offloaded`` went to disk and ``restored`` came back from there; ``retrieved`` was asked for, wherever it was.
    """

    current_bytes: int
    peak_bytes: int
    current_count: int
    peak_count: int
    stored: Volume
    retrieved: Volume
    offloaded: Volume
    restored: Volume
