"""What codecs failed to send, kept for the next step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from asyncpar.codecs import Values
from asyncpar.gradsync.plan import Bucket


class Feedback:
    """``residual`` is what earlier steps failed to send; ``lost`` becomes the next residual when the step succeeds.

    Both are float32 vectors of ``count`` values, those of the bucket first; None where nothing is kept.
    """

    def __init__(self, bucket: Bucket, *, count: int, is_kept: bool) -> None:
        self._bucket = bucket
        self.residual: Values | None = np.zeros(count, np.float32) if is_kept else None
        self.lost: Values | None = np.zeros(count, np.float32) if is_kept else None

    def commit(self) -> None:
        """Make what this step lost the residual of the next."""
        self.residual, self.lost = self.lost, self.residual
        if self.residual is not None:
            self.residual[self._bucket.count :] = 0.0  # padding belongs to no parameter

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(array.nbytes for array in (self.residual, self.lost) if array is not None)

    def by_name(self) -> Iterator[tuple[str, Values]]:
        """Yield a view of each parameter's residual, flat, by name."""
        if self.residual is not None:
            for slot in self._bucket.slots:
                yield slot.name, self.residual[slot.start : slot.stop]


def part(array: Values | None, place: slice) -> Values | None:
    """Return ``array[place]``; None of None."""
    return None if array is None else array[place]
