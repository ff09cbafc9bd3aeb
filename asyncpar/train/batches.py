"""Batches of text windows that do not depend on how many ranks there are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asyncpar.errors import UsageError

Corpus = NDArray[np.uint8]
"""A text, as bytes."""

Windows = NDArray[np.int64]


class Batches:
    """Random windows of ``length + 1`` bytes, ``rows`` per step.

    Inputs are all bytes of a window but the last, targets all but the first.  The batch of a step depends on ``seed``
    and the step's number only.
    """

    def __init__(self, corpus: Corpus, *, rows: int, length: int, seed: int) -> None:
        if rows < 1 or length < 1:
            raise UsageError(f"batch, seq: expected 1 or more, got {rows}, {length}")
        if corpus.size < length + 1:
            raise UsageError(f"text: expected at least {length + 1} bytes for windows of {length}, got {corpus.size}")
        self.rows = rows
        self.length = length
        self.corpus = corpus
        self._seed = seed

    @property
    def tokens(self) -> int:
        """Number of predictions in one whole batch."""
        return self.rows * self.length

    def windows(self, step: int, rows: slice | None = None) -> Windows:
        """Return the windows of ``step`` (of some ``rows`` of it), shape (rows, length + 1)."""
        rng = np.random.default_rng((self._seed, step))
        starts = rng.integers(0, self.corpus.size - self.length, self.rows)
        chosen = starts if rows is None else starts[rows]
        windows: Windows = self.corpus[chosen[:, np.newaxis] + np.arange(self.length + 1)].astype(np.int64)
        return windows


def split_rows(rows: int, *, rank: int, size: int) -> slice:
    """Return the rows of ``rank``: contiguous, in the order of ranks, sizes differing by one at most.

    Raises ``UsageError`` when there are not enough rows for every rank.
    """
    if rows < size:
        raise UsageError(f"batch: expected at least one row for each of {size} ranks, got {rows}")
    return slice(rank * rows // size, (rank + 1) * rows // size)
