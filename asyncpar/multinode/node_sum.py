"""Row sums for sharded training, node by node, and row sums that record their times."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.collectives.arrays import collective_reduction
from asyncpar.collectives.call import WatchedCall
from asyncpar.core.concurrency.tasks import off_loop
from asyncpar.core.config.names import ReduceOp
from asyncpar.gradsync import HostGroups
from asyncpar.gradsync.schemes import ReductionStep
from asyncpar.zero.buffers import BufferPool, Loans
from asyncpar.zero.partition import Rows
from asyncpar.zero.row_sum import CompressedSum, ReplicaSums, RowResiduals, RowSum, RowSums


class NodeSums(RowSums):
    """Sums over the world node by node: see ``NodeSum``."""

    def __init__(self, groups: HostGroups, *, is_compressed: bool) -> None:
        self.is_lossy = is_compressed
        self.loans = (2, 1)
        self._groups = groups
        leaders = groups.between
        self._between = None if leaders is None else ReplicaSums(leaders, is_compressed=is_compressed)

    def make(self, rows: Rows, row: Rows, *, op: ReduceOp, pool: BufferPool, feedback: RowResiduals | None) -> RowSum:
        return NodeSum(self._groups, rows, row, op=op, between=self._between, pool=pool, feedback=feedback)

    def senders(self, rows: int) -> NDArray[np.int64]:
        """Rows of other nodes are encoded, by the first rank of each node."""
        leaders, per_node = self._groups.between, self._groups.inside.size
        if leaders is None:
            return np.zeros(rows, np.int64)
        return np.where(np.arange(rows) // per_node == leaders.rank, 0, leaders.size - 1)

    def divisor(self, rows: int, dtype: np.dtype[Any], op: ReduceOp) -> int:
        return 1 if collective_reduction(op, dtype).scales else super().divisor(rows, dtype, op)

    def extra_bytes(self, rows: int, width: int, dtype: np.dtype[Any]) -> int:
        """Return the bytes on the first rank of a node: the sum of the node, the part of the node, and both encoded."""
        nodes = self._groups.hosts
        part = rows // nodes * width
        encoded = CompressedSum.extra_bytes(nodes, part) if self.is_lossy else 0
        return (rows * width + part) * dtype.itemsize + encoded


class NodeSum(RowSum):
    """Brings each rank the sum, or the mean, of its row over the world.

    Rows are added inside each node at its first rank; the first ranks exchange the rows of each other's nodes by
    ``between``, and distribute the rows of their nodes.  So a node sends others as much as one rank would.
    """

    def __init__(
        self,
        groups: HostGroups,
        rows: Rows,
        row: Rows,
        *,
        op: ReduceOp,
        between: RowSums | None,
        pool: BufferPool,
        feedback: RowResiduals | None,
    ) -> None:
        super().__init__(groups.world, rows, row, op=op)
        self._reduction = collective_reduction(op, rows.dtype)
        self._node = groups.inside
        self._loans = Loans(pool)
        self._total: Rows | None = None
        self._between: RowSum | None = None
        if between is not None and groups.between is not None:
            self._total = self._loans.take(rows.shape, rows.dtype)
            by_node = self._total.reshape(groups.between.size, -1)
            part = self._loans.take(by_node[:1].shape, rows.dtype)
            self._between = between.make(by_node, part, op="sum", pool=pool, feedback=feedback)

    def prepare(self) -> None:
        self._reduction.load(self.rows, self.rows, self._communicator.size)

    def begin(self, key: str) -> Coroutine[Any, Any, Any]:
        steps = self._steps(key)
        return WatchedCall(self._run(steps), lambda: _abort(steps))

    def settle(self) -> None:
        self._reduction.finish(self.row[0], self._communicator.size)

    async def _run(self, steps: list[ReductionStep]) -> None:
        try:
            for step in steps:
                if step.work is not None:
                    await off_loop(step.work, nbytes=self.rows.nbytes)
                await step.run()
        except BaseException:
            _abort(steps)
            raise

    def close(self, *, is_over: bool) -> None:
        if self._between is not None:
            self._between.close(is_over=is_over)
        self._loans.close(is_over=is_over)

    def _steps(self, key: str) -> list[ReductionStep]:
        """Return this rank's exchanges with others; those that are not the first of their node have no more."""
        node, between = self._node, self._between
        inside = ReductionStep(None, lambda: node.reduce(self.rows, root=0, out=self._total, key=f"{key}/node"))
        if between is None:
            return [inside, ReductionStep(None, lambda: node.scatter(out=self.row[0], key=f"{key}/back"))]

        def scatter() -> Coroutine[Any, Any, Any]:
            return node.scatter(between.row.reshape(node.size, -1), out=self.row[0], key=f"{key}/back")

        exchange = ReductionStep(between.prepare, lambda: between.begin(f"{key}/leaders"))
        return [inside, exchange, ReductionStep(between.settle, scatter)]


def _abort(steps: list[ReductionStep]) -> None:
    for step in steps:
        step.close()


Intervals = list[tuple[float, float]]
"""Starts and ends by the clock."""


class TimedSums(RowSums):
    """Sums of ``inner`` that append their times to the current result of ``intervals``."""

    def __init__(self, inner: RowSums, intervals: Callable[[], Intervals], clock: Callable[[], float]) -> None:
        self.is_lossy = inner.is_lossy
        self.loans = inner.loans
        self._inner = inner
        self._intervals = intervals
        self._clock = clock

    def make(self, rows: Rows, row: Rows, *, op: ReduceOp, pool: BufferPool, feedback: RowResiduals | None) -> RowSum:
        inner = self._inner.make(rows, row, op=op, pool=pool, feedback=feedback)
        return TimedSum(inner, self._intervals(), self._clock)

    def senders(self, rows: int) -> NDArray[np.int64]:
        return self._inner.senders(rows)

    def divisor(self, rows: int, dtype: np.dtype[Any], op: ReduceOp) -> int:
        return self._inner.divisor(rows, dtype, op)

    def extra_bytes(self, rows: int, width: int, dtype: np.dtype[Any]) -> int:
        return self._inner.extra_bytes(rows, width, dtype)


class TimedSum(RowSum):
    """``inner``, which also appends its period of activity to ``intervals``, once it has settled."""

    def __init__(self, inner: RowSum, intervals: Intervals, clock: Callable[[], float]) -> None:
        self.rows, self.row = inner.rows, inner.row
        self._inner = inner
        self._intervals = intervals
        self._clock = clock
        self._start = 0.0

    def prepare(self) -> None:
        self._start = self._clock()
        self._inner.prepare()

    def begin(self, key: str) -> Coroutine[Any, Any, Any]:
        return self._inner.begin(key)

    def settle(self) -> None:
        self._inner.settle()
        self._intervals.append((self._start, self._clock()))

    def close(self, *, is_over: bool) -> None:
        self._inner.close(is_over=is_over)
