"""Estimates of the costs of lanes from operations that run anyway.  Pure.

Theory of operation.  A rank takes part in an operation with ``rounds`` rounds of messages, in which it sends
``payload`` bytes.  For a small operation the seconds per round are the latency of a lane; for a large one the payload
divided by the seconds, less the latency of its rounds, is the bandwidth, including the work of combining.  Disturbances
(a late rank, a busy core) only ever delay, so the figure is that of the fastest quarter of the latest operations: a
single lucky one does not count, and a link that has become slower shows after a few.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncpar.collectives.ledger import LARGE_CALL_BYTES

_WINDOW: Final = 32
"""Number of latest operations of each kind that count."""

_SMALL_BYTES: Final = 4 << 10
_QUICKEST: Final = 4
_MOST_LATENCY: Final = 4.0
"""At least a quarter of a large operation's time is due to its length: the latency was observed at another time."""

SYMMETRIC: Final = frozenset({"all_reduce", "reduce_scatter", "all_gather", "all_to_all"})
"""Operations in which every rank sends and receives alike; where a rank only sends, its time is not that of a lane."""

UNKNOWN: Final = -np.inf


class LaneEstimate:
    """Running figures of the lanes of one group on one rank; ``add`` takes finished operations by messages."""

    __slots__ = ("_bandwidths", "_latencies")

    def __init__(self) -> None:
        self._latencies: deque[float] = deque(maxlen=_WINDOW)
        """Seconds per round."""
        self._bandwidths: deque[float] = deque(maxlen=_WINDOW)
        """Bytes/s."""

    def add(self, *, rounds: int, payload: int, seconds: float) -> None:
        """Add an operation of ``rounds`` rounds, from 1, in which this rank sent ``payload`` bytes."""
        if seconds <= 0.0:
            return
        if payload <= _SMALL_BYTES:
            self._latencies.append(seconds / rounds)
        elif payload >= LARGE_CALL_BYTES:
            waited = rounds * (self.latency or 0.0)
            self._bandwidths.append(payload / max(seconds - waited, seconds / _MOST_LATENCY))

    @property
    def latency(self) -> float | None:
        """Seconds of a message; None before the first small operation."""
        return quickest_quartile(sorted(self._latencies))

    @property
    def bandwidth(self) -> float | None:
        """Bytes/s; None before the first large operation."""
        return quickest_quartile(sorted(self._bandwidths, reverse=True))

    def figures(self) -> NDArray[np.float64]:
        """Return the negative latency and the bandwidth, -inf where unknown: the maximum over the ranks counts."""
        latency, bandwidth = self.latency, self.bandwidth
        return np.array([UNKNOWN if latency is None else -latency, UNKNOWN if bandwidth is None else bandwidth])


def quickest_quartile(quickest_first: Sequence[float]) -> float | None:
    """Return the last value of the fastest quarter; None if there are none."""
    return quickest_first[(len(quickest_first) - 1) // _QUICKEST] if quickest_first else None
