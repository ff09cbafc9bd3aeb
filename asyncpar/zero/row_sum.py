"""Sums of the rows of a bucket, each at its owner, with error feedback for 8-bit rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.codecs import Identity, Values
from asyncpar.codecs.int8 import Int8
from asyncpar.codecs.rows import RowFormat, are_finite
from asyncpar.collectives.arrays import reduction_for
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.names import ReduceOp, ReduceScatterAlgorithm
from asyncpar.zero.buffers import BufferPool, Loans
from asyncpar.zero.partition import Partition, RowBucket, Rows, encoded_bytes, pack_rows, unpack_rows

_CODEC = Int8()


class RowSum(ABC):
    """Brings this rank the sum, or the mean, of its row over all ranks.

    ``rows`` is filled first; after ``prepare``, the collective of ``begin``, and ``settle``, ``row`` holds the result.
    ``prepare`` and ``settle`` compute, and wait for no rank.
    """

    def __init__(self, communicator: Communicator, rows: Rows, row: Rows, *, op: ReduceOp) -> None:
        self.rows = rows
        self.row = row
        self._communicator = communicator
        self._op = op

    @abstractmethod
    def prepare(self) -> None:
        """Prepare the data to send."""

    @abstractmethod
    def begin(self, key: str) -> Coroutine[Any, Any, Any]:
        """Return the collective with the key ``key``; closed before it is awaited, it is aborted on all ranks."""

    @abstractmethod
    def settle(self) -> None:
        """Compute ``row`` from the received data."""

    def close(self, *, is_over: bool) -> None:  # noqa: B027
        """Return memory; unless all ``is_over``, others may still read it."""


class RowSums(ABC):
    """Creates the sums of buckets, all in the same way."""

    leaves_rows = False
    """Whether sums only read ``rows``, so that these may be the gradient itself."""
    is_lossy: bool
    """Whether rows lose values that error feedback can send later."""
    loans: tuple[int, int] = (1, 1)
    """Numbers of matrices of all rows, and of single rows, that a bucket takes from the pool."""

    def corrections(self, rows: int, dtype: np.dtype[Any], op: ReduceOp) -> NDArray[np.float64]:
        """Return each row's residual here for a result that lacks 1, by owner; 0 where nothing is encoded.

        The residuals of a row on all ranks add up to ``divisor``.
        """
        senders = self.senders(rows)
        return np.where(senders > 0, self.divisor(rows, dtype, op) / np.maximum(senders, 1), 0.0)

    @abstractmethod
    def senders(self, rows: int) -> NDArray[np.int64]:
        """Return the number of ranks that encode each of ``rows`` rows, by owner; 0 for rows not encoded on this
        rank.
        """

    def divisor(self, rows: int, dtype: np.dtype[Any], op: ReduceOp) -> int:  # noqa: ARG002
        """Return the divisor of residuals on their way into a result."""
        return rows if op == "mean" else 1

    @property
    def codec_name(self) -> str:
        """The name of the codec that encodes rows."""
        return _CODEC.name if self.is_lossy else Identity.name

    @abstractmethod
    def make(self, rows: Rows, row: Rows, *, op: ReduceOp, pool: BufferPool, feedback: RowResiduals | None) -> RowSum:
        """Return the sum of ``rows`` into ``row`` by ``op``, ``"sum"`` or ``"mean"``.

        Its memory comes from ``pool``; the errors of rows go into ``feedback``, if given.
        """

    @abstractmethod
    def extra_bytes(self, rows: int, width: int, dtype: np.dtype[Any]) -> int:
        """Return the most memory that a rank takes, besides rows and row, for ``rows`` rows of ``width`` values."""


class PlainSum(RowSum):
    """A reduce-scatter: each rank sends all rows but its own, the least possible."""

    def __init__(
        self,
        communicator: Communicator,
        rows: Rows,
        row: Rows,
        *,
        op: ReduceOp,
        algorithm: ReduceScatterAlgorithm | None = None,
    ) -> None:
        super().__init__(communicator, rows, row, op=op)
        self._algorithm = algorithm

    def prepare(self) -> None:
        return

    def begin(self, key: str) -> Coroutine[Any, Any, Any]:
        return self._communicator.reduce_scatter(
            self.rows, op=self._op, out=self.row, algorithm=self._algorithm, key=key
        )

    def settle(self) -> None:
        return


class CompressedSum(RowSum):
    """Sum of rows that are sent as 8-bit integers; the owner decodes and adds them in float32, in rank order.

    The owner's own row is added unencoded.  A non-finite row makes the result NaN.  The encoding error goes into
    ``feedback``, if given, and is added to the rows of the next step.
    """

    def __init__(
        self,
        communicator: Communicator,
        rows: Rows,
        row: Rows,
        *,
        op: ReduceOp,
        pool: BufferPool,
        feedback: RowResiduals | None,
    ) -> None:
        super().__init__(communicator, rows, row, op=op)
        self._format = RowFormat(_CODEC, rows.shape[1])
        self._feedback = feedback
        self._loans = Loans(pool)
        shape = (len(rows), self._format.nbytes)
        self._outgoing: NDArray[np.uint8] = self._loans.take(shape, np.uint8)
        self._incoming: NDArray[np.uint8] = self._loans.take(shape, np.uint8)
        self._total: NDArray[np.float32] = self._loans.take(rows.shape[1:], np.float32)

    def prepare(self) -> None:
        residual = lost = None
        if self._feedback is not None:
            sent = (len(self.rows) - 1, self.rows.shape[1])
            residual, lost = (array.reshape(sent) for array in self._feedback.open())
        others = (rank for rank in range(len(self.rows)) if rank != self._communicator.rank)
        for place, rank in enumerate(others):
            self._format.encode(
                self.rows[rank].astype(np.float32, copy=False),
                self._outgoing[rank],
                residual=None if residual is None else residual[place],
                lost=None if lost is None else lost[place],
            )

    def begin(self, key: str) -> Coroutine[Any, Any, Any]:
        return self._communicator.all_to_all(self._outgoing, out=self._incoming, key=key)

    def settle(self) -> None:
        total = self._total
        total.fill(0.0)
        with np.errstate(over="ignore", invalid="ignore"):
            for rank in range(len(self._incoming)):
                if rank == self._communicator.rank:
                    total += self.rows[rank].astype(np.float32, copy=False)
                elif are_finite(self._incoming[rank]):
                    self._format.decode(self._incoming, rank, total, adds=True, what="gradients")
                else:
                    total.fill(np.nan)
            reduction_for(self._op, total.dtype).finish(total, self._communicator.size)
            self.row[0] = total

    def close(self, *, is_over: bool) -> None:
        self._loans.close(is_over=is_over)

    @staticmethod
    def extra_bytes(rows: int, width: int) -> int:
        """Return the memory of the encoded rows, outgoing and incoming, and of the total."""
        return encoded_bytes(rows, width, np.dtype(np.float32))


class ReplicaSums(RowSums):
    """Sums over ``communicator``: of 8-bit rows if ``is_compressed``, else a reduce-scatter by ``algorithm``."""

    def __init__(
        self, communicator: Communicator, *, is_compressed: bool, algorithm: ReduceScatterAlgorithm | None = None
    ) -> None:
        self.is_lossy = is_compressed
        self.leaves_rows = not is_compressed
        self.loans = (1, 2 if is_compressed else 1)
        self._communicator = communicator
        self._algorithm = algorithm

    def make(self, rows: Rows, row: Rows, *, op: ReduceOp, pool: BufferPool, feedback: RowResiduals | None) -> RowSum:
        if self.is_lossy:
            return CompressedSum(self._communicator, rows, row, op=op, pool=pool, feedback=feedback)
        return PlainSum(self._communicator, rows, row, op=op, algorithm=self._algorithm)

    def senders(self, rows: int) -> NDArray[np.int64]:
        senders = np.full(rows, rows - 1)
        senders[self._communicator.rank] = 0
        return senders

    def extra_bytes(self, rows: int, width: int, dtype: np.dtype[Any]) -> int:  # noqa: ARG002
        return CompressedSum.extra_bytes(rows, width) if self.is_lossy else 0


Residuals = NDArray[np.float32]
"""A row for each encoded row of a bucket, in their order."""


class RowResiduals(ABC):
    """The residuals of the rows that a sum encodes."""

    @abstractmethod
    def open(self) -> tuple[Residuals, Residuals]:
        """Return the residuals to add to the rows encoded now, and the array for their new errors.

        Both have a row for each encoded row; they may be the same array.
        """

    def store(self) -> None:  # noqa: B027
        """Keep the new errors; to be called after rows were encoded."""


class ThinnedResiduals(RowResiduals):
    """The ``columns`` of ``whole`` that are sent; the others, of frozen parameters, stay unchanged."""

    def __init__(self, whole: RowFeedback, columns: NDArray[np.intp]) -> None:
        self._whole = whole
        self._columns = columns
        self._opened: tuple[Residuals, Residuals, Residuals] | None = None

    def open(self) -> tuple[Residuals, Residuals]:
        source, lost = self._whole.open()
        residual = np.ascontiguousarray(source[:, self._columns])
        self._opened = source, lost, residual
        return residual, residual

    def store(self) -> None:
        if self._opened is not None:
            source, lost, residual = self._opened
            if lost is not source:
                lost[...] = source
            lost[:, self._columns] = residual
            self._opened = None


class RowFeedback(RowResiduals):
    """The residuals of the encoded rows of one bucket.  They take no memory before the first row is encoded.

    Within a step each reduction continues from the errors of the previous one; a step that is not taken leaves no
    trace.
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        self._shape = shape
        self._arrays: tuple[Residuals, Residuals] | None = None
        self._has_lost = False

    def open(self) -> tuple[Residuals, Residuals]:
        if self._arrays is None:
            self._arrays = (np.zeros(self._shape, np.float32), np.zeros(self._shape, np.float32))
        residual, lost = self._arrays
        source = lost if self._has_lost else residual
        self._has_lost = True
        return source, lost

    def commit(self) -> None:
        """Make the errors of this step the residual of the next."""
        if self._has_lost and self._arrays is not None:
            residual, lost = self._arrays
            self._arrays = (lost, residual)
        self._has_lost = False

    def drop(self) -> None:
        """Drop the errors of this step, which is not taken."""
        self._has_lost = False

    @property
    def residual(self) -> Residuals | None:
        """The writable residual of the next step; None if nothing was encoded yet."""
        return None if self._arrays is None else self._arrays[0]

    def restore(self) -> Residuals:
        """Replace the current residual by zeros and return it, writable."""
        self._arrays, self._has_lost = None, False
        residual, _ = self.open()
        self._has_lost = False
        return residual

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 0 if self._arrays is None else sum(array.nbytes for array in self._arrays)


Corrections = Callable[[np.dtype[Any]], NDArray[np.float64]]
"""See ``RowSums.corrections``."""


class StepFeedback:
    """The residuals of rows ``encoded`` of all buckets; by parameter they survive another division into buckets."""

    def __init__(self, partition: Partition, encoded: Iterable[int]) -> None:
        self._partition = partition
        self._encoded = list(encoded)
        self._rows = tuple(RowFeedback((len(self._encoded), bucket.width)) for bucket in partition.buckets)

    def of(self, bucket: RowBucket) -> RowResiduals | None:
        """Return the residuals of ``bucket``, which may lack frozen parameters; None if it has no values."""
        if bucket.origin is None:
            return self._rows[bucket.index]
        whole, rows = self._partition.buckets[bucket.origin], self._rows[bucket.origin]
        if bucket.width == whole.width and bucket.slots:
            return rows
        offsets = {(slot.parameter, slot.low): slot.offset for slot in whole.slots}
        columns = [np.arange(slot.high - slot.low) + offsets[slot.parameter, slot.low] for slot in bucket.slots]
        return ThinnedResiduals(rows, np.concatenate(columns)) if columns else None

    def commit(self) -> None:
        """Make the errors of this step the residuals of the next."""
        for rows in self._rows:
            rows.commit()

    def drop(self) -> None:
        """Drop the errors of this step."""
        for rows in self._rows:
            rows.drop()

    def owe(self, lacking: Mapping[str, NDArray[Any]], corrections: Corrections) -> None:
        """Compensate for ``lacking`` of results, flat, by parameter; ``corrections`` are those of rows of a dtype."""
        for bucket, rows in zip(self._partition.buckets, self._rows, strict=True):
            factors = corrections(bucket.dtype)
            if not factors.any() and rows.residual is None:
                continue
            matrix = self._zeros(bucket)
            for slot in bucket.slots:
                flat = lacking.get(self._partition.specs[slot.parameter].name)
                if flat is not None:
                    pack_rows(self._partition, slot, flat, matrix)
            matrix *= factors[:, np.newaxis].astype(np.float32)
            rows.restore()[...] = matrix[self._encoded]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(rows.nbytes for rows in self._rows)

    @property
    def nbytes_needed(self) -> int:
        """Bytes held once all rows have been encoded."""
        return sum(8 * len(self._encoded) * bucket.width for bucket in self._partition.buckets)

    def by_name(self) -> dict[str, Values]:
        """Return a copy of each parameter's residual, flat; parameters that were never encoded are left out."""
        found: dict[str, Values] = {}
        for bucket, rows in zip(self._partition.buckets, self._rows, strict=True):
            if rows.residual is None:
                continue
            matrix = self._zeros(bucket)
            matrix[self._encoded] = rows.residual
            for slot in bucket.slots:
                spec = self._partition.specs[slot.parameter]
                flat = found.setdefault(spec.name, np.zeros(spec.count, np.float32))
                unpack_rows(self._partition, slot, matrix, flat, ranks=self._encoded)
        return found

    def restore(self, residuals: Mapping[str, NDArray[Any]]) -> None:
        """Restore residuals of an earlier run, flat, by parameter; missing ones, and those of another size, are 0."""
        for bucket, rows in zip(self._partition.buckets, self._rows, strict=True):
            known = list(self._fitting(bucket, residuals))
            if not known and rows.residual is None:
                continue
            matrix = self._zeros(bucket)
            for slot, flat in known:
                pack_rows(self._partition, slot, flat, matrix)
            rows.restore()[...] = matrix[self._encoded]

    def _zeros(self, bucket: RowBucket) -> Rows:
        return np.zeros((self._partition.size, bucket.width), np.float32)

    def _fitting(self, bucket: RowBucket, residuals: Mapping[str, NDArray[Any]]) -> Iterator[tuple[Any, Values]]:
        for slot in bucket.slots:
            spec = self._partition.specs[slot.parameter]
            flat = residuals.get(spec.name)
            if flat is not None and flat.size == spec.count:
                yield slot, np.asarray(flat, np.float32).reshape(-1)
