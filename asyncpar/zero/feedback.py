"""Error feedback of compressed sums of rows: what encoded rows failed to carry is sent with the next step's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.codecs import Values
from asyncpar.zero.partition import Partition, RowBucket, pack_rows, unpack_rows

Residuals = NDArray[np.float32]
"""A row per rank, like the rows of a bucket."""


class RowFeedback:
    """The residuals of one bucket's rows.  They take no memory before the first row is encoded.

    Within a step each reduction goes on from what the one before it lost; a step that is not taken leaves no trace.
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        self._shape = shape
        self._arrays: tuple[Residuals, Residuals] | None = None
        self._has_lost = False

    def open(self) -> tuple[Residuals, Residuals]:
        """Return what to add to the rows that are encoded now, and where to write what they lose.

        Both have the shape of the bucket's rows; they may be the same array.
        """
        if self._arrays is None:
            self._arrays = (np.zeros(self._shape, np.float32), np.zeros(self._shape, np.float32))
        residual, lost = self._arrays
        source = lost if self._has_lost else residual
        self._has_lost = True
        return source, lost

    def commit(self) -> None:
        """Make what this step lost the residual of the next."""
        if self._has_lost and self._arrays is not None:
            residual, lost = self._arrays
            self._arrays = (lost, residual)
        self._has_lost = False

    def drop(self) -> None:
        """Forget what this step lost: it is not taken."""
        self._has_lost = False

    @property
    def residual(self) -> Residuals | None:
        """The residual of the next step, to be written to; None where nothing was encoded yet."""
        return None if self._arrays is None else self._arrays[0]

    def restore(self) -> Residuals:
        """Return a residual of zeros, to be written to, in place of the present one."""
        self._arrays, self._has_lost = None, False
        residual, _ = self.open()
        self._has_lost = False
        return residual

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 0 if self._arrays is None else sum(array.nbytes for array in self._arrays)


class StepFeedback:
    """The residuals of all buckets; by parameter they survive another division into buckets."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._rows = tuple(RowFeedback((partition.size, bucket.width)) for bucket in partition.buckets)

    def of(self, bucket: RowBucket) -> RowFeedback:
        """Return the residuals of ``bucket``."""
        return self._rows[bucket.index]

    def commit(self) -> None:
        """Make what this step lost the residual of the next."""
        for rows in self._rows:
            rows.commit()

    def drop(self) -> None:
        """Forget what this step lost."""
        for rows in self._rows:
            rows.drop()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(rows.nbytes for rows in self._rows)

    @property
    def nbytes_needed(self) -> int:
        """Bytes held once everything was encoded."""
        return sum(8 * self._partition.size * bucket.width for bucket in self._partition.buckets)

    def by_name(self) -> dict[str, Values]:
        """Return a copy of each parameter's residual, flat; parameters of which nothing was encoded are left out."""
        found: dict[str, Values] = {}
        for bucket, rows in zip(self._partition.buckets, self._rows, strict=True):
            if rows.residual is None:
                continue
            for slot in bucket.slots:
                spec = self._partition.specs[slot.parameter]
                flat = found.setdefault(spec.name, np.zeros(spec.count, np.float32))
                unpack_rows(self._partition, slot, rows.residual, flat, ranks=range(self._partition.size))
        return found

    def restore(self, residuals: Mapping[str, NDArray[Any]]) -> None:
        """Go on from the residuals of an earlier run, flat, by parameter; others, and those of another size, are 0."""
        for bucket, rows in zip(self._partition.buckets, self._rows, strict=True):
            known = list(self._fitting(bucket, residuals))
            if not known and rows.residual is None:
                continue
            matrix = rows.restore()
            for slot, flat in known:
                pack_rows(self._partition, slot, flat, matrix)

    def _fitting(self, bucket: RowBucket, residuals: Mapping[str, NDArray[Any]]) -> Iterator[tuple[Any, Values]]:
        for slot in bucket.slots:
            spec = self._partition.specs[slot.parameter]
            flat = residuals.get(spec.name)
            if flat is not None and flat.size == spec.count:
                yield slot, np.asarray(flat, np.float32).reshape(-1)
