"""Sums of rows for sharded training, node by node."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncpar.collectives.offload import off_loop
from asyncpar.collectives.reduction import reduction_for
from asyncpar.multinode.groups import NodeGroups
from asyncpar.zero.buffers import BufferPool, Lent
from asyncpar.zero.owed import Owed
from asyncpar.zero.packing import Rows
from asyncpar.zero.row_sum import CompressedSum, PlainSum, RowSum


@dataclass(frozen=True, slots=True)
class _Leg:
    """Work, then a collective."""

    work: Callable[[], None] | None
    exchange: Owed[Any]


class NodeSum(RowSum):
    """Brings each rank the sum, or the mean, of its row over the world.

    Rows are added inside each node at its first rank; the first ranks exchange what belongs to each other's nodes,
    in 8 bits if ``is_compressed``, and hand the rows of their nodes out.  So a node sends others what one rank would.
    Memory for that comes from ``pool``.
    """

    def __init__(
        self, groups: NodeGroups, rows: Rows, row: Rows, *, op: str, is_compressed: bool, pool: BufferPool
    ) -> None:
        super().__init__(groups.world, rows, row, op=op)
        self._node = groups.node
        self._pool = pool
        self._memory: list[Lent] = []
        self._total: Rows | None = None
        self._between: RowSum | None = None
        leaders = groups.leaders
        if leaders is not None:
            self._total = self._take(rows.shape, rows.dtype)
            by_node = self._total.reshape(leaders.size, -1)
            make = CompressedSum if is_compressed else PlainSum
            self._between = make(leaders, by_node, self._take(by_node[:1].shape, rows.dtype), op="sum")

    def prepare(self) -> None:
        return

    def begin(self, key: str) -> Coroutine[Any, Any, Any]:
        return self._go(self._legs(key))

    def settle(self) -> None:
        reduction_for(self._op, self.row.dtype).finish(self.row[0], self._communicator.size)

    async def _go(self, legs: list[_Leg]) -> None:
        try:
            for leg in legs:
                if leg.work is not None:
                    await off_loop(leg.work, nbytes=self.rows.nbytes)
                await leg.exchange.run()
        except BaseException:
            self._drop(legs)
            raise
        for lent in self._memory:
            self._pool.give_back(lent)

    def give_up(self, key: str) -> None:
        self._drop(self._legs(key))

    def _drop(self, legs: list[_Leg]) -> None:
        """Abort all ``legs`` that have not begun.  Others may still read the memory, so it is not used again."""
        for leg in legs:
            leg.exchange.give_up()
        for lent in self._memory:
            self._pool.discard(lent)

    def _legs(self, key: str) -> list[_Leg]:
        """Return what this rank has to do with others; those that are not the first of their node have no more."""
        node, between = self._node, self._between
        inside = Owed(lambda: node.reduce(self.rows, root=0, out=self._total, key=f"{key}/node"))
        if between is None:
            back = Owed(lambda: node.scatter(out=self.row[0], key=f"{key}/back"))
            return [_Leg(None, inside), _Leg(None, back)]
        exchange = Owed(lambda: between.begin(f"{key}/leaders"))
        back = Owed(lambda: node.scatter(between.row.reshape(node.size, -1), out=self.row[0], key=f"{key}/back"))
        return [_Leg(None, inside), _Leg(between.prepare, exchange), _Leg(between.settle, back)]

    def _take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Rows:
        lent = self._pool.take(shape, dtype)
        self._memory.append(lent)
        return lent.array
