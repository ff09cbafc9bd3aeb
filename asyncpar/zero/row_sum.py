"""How the rows of a bucket are summed, each by its owner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.codecs.int8 import Int8
from asyncpar.codecs.rows import RowFormat, are_finite
from asyncpar.collectives.arrays import reduction_for
from asyncpar.collectives.communicator import Communicator
from asyncpar.zero.buffers import BufferPool, Loans
from asyncpar.zero.feedback import RowFeedback
from asyncpar.zero.partition import Rows

_CODEC = Int8()


class RowSum(ABC):
    """Brings this rank the sum, or the mean, of its row over all ranks.

    ``rows`` is filled first; after ``prepare``, what ``begin`` returns and ``settle``, ``row`` holds the result.
    ``prepare`` and ``settle`` compute, and wait for no rank.
    """

    def __init__(self, communicator: Communicator, rows: Rows, row: Rows, *, op: str) -> None:
        self.rows = rows
        self.row = row
        self._communicator = communicator
        self._op = op

    @abstractmethod
    def prepare(self) -> None:
        """Get ready to send."""

    @abstractmethod
    def begin(self, key: str) -> Coroutine[Any, Any, Any]:
        """Return the collective with the key ``key``; ended before it is awaited, it is aborted on all ranks."""

    @abstractmethod
    def settle(self) -> None:
        """Compute ``row`` from the received data."""

    def close(self, *, is_over: bool) -> None:  # noqa: B027
        """Give back memory; unless all ``is_over``, others may still read it."""


class RowSums(ABC):
    """Makes the sums of buckets, all in one way."""

    is_lossy: bool
    """Do rows lose values that error feedback can send later?"""

    @abstractmethod
    def make(self, rows: Rows, row: Rows, *, op: str, pool: BufferPool, feedback: RowFeedback | None) -> RowSum:
        """Return the sum of ``rows`` into ``row`` by ``op``, ``"sum"`` or ``"mean"``.

        What it takes of memory comes from ``pool``; what rows lose goes into ``feedback``, if given.
        """

    @abstractmethod
    def extra_bytes(self, rows: int, width: int, dtype: np.dtype[Any]) -> int:
        """Return the most that a rank takes, besides rows and row, for ``rows`` rows of ``width`` values."""


class PlainSum(RowSum):
    """A reduce-scatter: each rank sends all rows but its own, the least possible."""

    def __init__(
        self, communicator: Communicator, rows: Rows, row: Rows, *, op: str, algorithm: str | None = None
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
    """Rows travel as 8-bit integers; the owner decodes them and adds them in float32, in rank order.

    Its own row it adds as it is.  A row that is not finite makes the result NaN.  What encoding loses goes into
    ``feedback``, if given, and is added to the rows of the next step.
    """

    def __init__(
        self,
        communicator: Communicator,
        rows: Rows,
        row: Rows,
        *,
        op: str,
        pool: BufferPool,
        feedback: RowFeedback | None,
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
            residual, lost = (array.reshape(self.rows.shape) for array in self._feedback.open())
        for rank, row in enumerate(self.rows):
            if rank != self._communicator.rank:
                self._format.encode(
                    row.astype(np.float32, copy=False),
                    self._outgoing[rank],
                    residual=None if residual is None else residual[rank],
                    lost=None if lost is None else lost[rank],
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
        """Return what the encoded rows, which go and come, and the total take."""
        return 2 * rows * RowFormat(_CODEC, width).nbytes + 4 * width


class ReplicaSums(RowSums):
    """Sums over ``communicator``: of 8-bit rows if ``is_compressed``, else a reduce-scatter by ``algorithm``."""

    def __init__(self, communicator: Communicator, *, is_compressed: bool, algorithm: str | None = None) -> None:
        self.is_lossy = is_compressed
        self._communicator = communicator
        self._algorithm = algorithm

    def make(self, rows: Rows, row: Rows, *, op: str, pool: BufferPool, feedback: RowFeedback | None) -> RowSum:
        if self.is_lossy:
            return CompressedSum(self._communicator, rows, row, op=op, pool=pool, feedback=feedback)
        return PlainSum(self._communicator, rows, row, op=op, algorithm=self._algorithm)

    def extra_bytes(self, rows: int, width: int, dtype: np.dtype[Any]) -> int:  # noqa: ARG002
        return CompressedSum.extra_bytes(rows, width) if self.is_lossy else 0
