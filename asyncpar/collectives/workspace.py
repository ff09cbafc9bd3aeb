"""The memory that plans run over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from asyncpar.collectives.execute import Region, region_of
from asyncpar.collectives.layout import Slice
from asyncpar.collectives.reduction import Array
from asyncpar.collectives.staging import StagingPool


class InPlace:
    """Regions in the caller's own arrays; ``finish(piece)`` is called for each piece that is through."""

    __slots__ = ("_finish", "_regions")

    def __init__(self, *arrays: Array, finish: Callable[[int], None] | None = None) -> None:
        self._regions = tuple(region_of(array) for array in arrays)
        self._finish = finish

    def open(self, piece: int) -> Sequence[Region]:  # noqa: ARG002
        return self._regions

    def close(self, piece: int, regions: Sequence[Region]) -> None:  # noqa: ARG002
        if self._finish is not None:
            self._finish(piece)


class Scratch:
    """One scratch region per piece, filled from slices of ``source`` and emptied into slices of ``target``.

    ``fill(piece)`` and ``drain(piece)`` list pairs of slices: of the scratch, and of the array.
    """

    def __init__(
        self,
        *,
        pool: StagingPool,
        dtype: np.dtype[Any],
        length: Callable[[int], int],
        source: Array,
        fill: Callable[[int], Sequence[tuple[Slice, Slice]]],
        target: Array | None = None,
        drain: Callable[[int], Sequence[tuple[Slice, Slice]]] | None = None,
    ) -> None:
        self._pool = pool
        self._dtype = dtype
        self._length = length
        self._source = source
        self._fill = fill
        self._target = target
        self._drain = drain

    def open(self, piece: int) -> Sequence[Region]:
        scratch = self._pool.take(self._length(piece), self._dtype)
        for (_, start, stop), (_, first, last) in self._fill(piece):
            scratch[start:stop] = self._source[first:last]
        return (region_of(scratch),)

    def close(self, piece: int, regions: Sequence[Region]) -> None:
        scratch = regions[0].array
        if self._drain is not None and self._target is not None:
            for (_, start, stop), (_, first, last) in self._drain(piece):
                self._target[first:last] = scratch[start:stop]
        self._pool.give_back(scratch)
