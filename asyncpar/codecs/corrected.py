"""``values + residual`` in pieces that stay in the cache, computed once if there is an array to store the sum."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from asyncpar.codecs.codec import Values, corrected

BLOCK = 1 << 16
"""Values per piece.  The format of top-k numbers values within such blocks, in 16 bits."""


class Corrected:
    """The values to encode.  The first complete pass stores them in ``lost``, if given, which later passes read."""

    def __init__(self, values: Values, residual: Values | None, lost: Values | None) -> None:
        self._values = values
        self._residual = residual
        self._lost = lost
        self.size = values.size

    def pieces(self) -> Iterator[Values]:
        """Yield ``BLOCK`` values at a time, finite or not; use each before the next one, and iterate to the end."""
        room = np.empty(min(BLOCK, self.size), np.float32)
        for start in range(0, self.size, BLOCK):
            yield corrected(self._values, self._residual, self._lost, slice(start, start + BLOCK), room)
        if self._lost is not None:
            self._values, self._residual, self._lost = self._lost, None, None

    def take(self, positions: NDArray[np.int64]) -> Values:
        """Return the values at ``positions``."""
        taken = self._values[positions]
        if self._residual is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                taken += self._residual[positions]
        return taken
