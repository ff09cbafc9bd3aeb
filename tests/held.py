"""Memory that numpy arrays really take, for tests of figures that say so."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

_OTHERS = ("*/collectives/arrays.py", "*/collectives/shared_memory/*", "*/transport/*", "*/arena/*")
"""The owners of arrays that belong to the world, not to one user of it."""


class HeldArrays:
    """Bytes of the numpy arrays made in the block that were still there at its end; without those of the world."""

    nbytes = 0


@contextmanager
def held_arrays() -> Iterator[HeldArrays]:
    """Count the arrays that a block leaves behind."""
    held = HeldArrays()
    gc.collect()
    tracemalloc.start()
    try:
        yield held
        gc.collect()
        snapshot = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    filters: list[tracemalloc.DomainFilter | tracemalloc.Filter] = [
        tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    ]
    filters += [tracemalloc.Filter(False, pattern) for pattern in _OTHERS]
    held.nbytes = sum(trace.size for trace in snapshot.filter_traces(filters).traces)
