"""Histograms of the durations of collective operations, from the records of a ring.  Pure.

A ring is inspected once a second.  Its records are read by columns, which takes a fraction of a millisecond, and each
is counted once: a place of the ring has another lap in each event.  If there are more than 4,096 events between two
inspections, the first are missed, so a histogram may count fewer operations than there were.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncpar.core.observe.records import RECORD_BYTES, RECORDS_OFFSET, EventKind, EventState
from asyncpar.observe.image import read_operation_names
from asyncpar.observe.summary import DurationSummary

BOUNDS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0),
)
"""Upper bounds of buckets in seconds: the usual ones of Prometheus, and as many below; the last bucket has none."""

_COLUMNS: Final = np.dtype(
    [
        *(("lap", "<u4"), ("peer", "<u2"), ("kind", "u1"), ("state", "u1"), ("ended", "<f8"), ("created", "<f8")),
        *(("fingerprint", "<u4"), ("name", "<u4"), ("group", "<u8"), ("sequence", "<u8"), ("nbytes", "<u8")),
        *(("site", "<u4"), ("closing", "<u4")),
    ]
)
"""``RECORD`` as a numpy dtype."""

assert _COLUMNS.itemsize == RECORD_BYTES


class OperationTimes:
    """Histograms of the operations of one ring of ``capacity`` places, from the event with the ticket ``first`` on."""

    def __init__(self, capacity: int, first: int) -> None:
        self._capacity = capacity
        places = np.arange(capacity, dtype=np.int64)
        self._counted: NDArray[np.uint32] = np.maximum(-(-(first - places) // capacity), 0).astype(np.uint32)
        """By place: the lap of the last event there that is in the histograms, or belongs to an earlier node."""
        self._names: Mapping[int, str] = {}
        self._found: dict[str, tuple[NDArray[np.int64], float]] = {}

    def add(self, image: bytes) -> tuple[DurationSummary, ...]:
        """Add the operations that have completed since the last inspection; return the histograms by name."""
        records = self._read(image)
        is_new = _is_over(records) & (records["lap"] != self._counted)
        self._counted[is_new] = records["lap"][is_new]
        new = records[is_new & (records["state"] == EventState.COMPLETED)]
        words = new["name"]
        if not self._names.keys() >= {int(word) for word in np.unique(words)}:
            self._names = read_operation_names(image)
        seconds = np.maximum(new["ended"] - new["created"], 0.0)
        for word in np.unique(words):
            self._add(self._names.get(int(word), "?"), seconds[words == word])
        return tuple(
            DurationSummary(name=name, counts=tuple(counts.tolist()), seconds=total)
            for name, (counts, total) in sorted(self._found.items())
        )

    def _read(self, image: bytes) -> NDArray[np.void]:
        return np.frombuffer(image, _COLUMNS, count=self._capacity, offset=RECORDS_OFFSET)

    def _add(self, name: str, seconds: NDArray[np.float64]) -> None:
        counts, total = self._found.get(name, (np.zeros(len(BOUNDS) + 1, np.int64), 0.0))
        buckets = np.searchsorted(BOUNDS, seconds, side="left")
        counts = counts + np.bincount(buckets, minlength=len(counts))
        self._found[name] = counts, total + float(seconds.sum())


def _is_over(records: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return a mask of the records that are whole, and of collective operations that are over."""
    is_whole = (records["lap"] != 0) & (records["lap"] == records["closing"])
    found: NDArray[np.bool_] = is_whole & (records["kind"] == EventKind.COLLECTIVE)
    return found & (records["state"] >= EventState.COMPLETED)


def cumulate(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Return cumulative counts: the operations in each bucket and those before it."""
    return tuple(accumulate(counts))
