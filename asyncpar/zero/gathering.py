"""Gather values from their owners on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from asyncpar.agreement.exchanges import OwedCollective
from asyncpar.core.concurrency.offload import off_loop
from asyncpar.nn.parameter import Array
from asyncpar.zero.buffers import BufferPool, Lent
from asyncpar.zero.partition import Partition, RowBucket, pack_own, unpack_rows
from asyncpar.zero.reduction import Means
from asyncpar.zero.share import ParameterShare


class BucketGather:
    """Gathers the values of one bucket, once.

    ``partition`` is that of ``shares``; what they own goes into ``targets``, the flat values of each parameter.
    """

    def __init__(
        self, bucket: RowBucket, means: Means, partition: Partition, shares: Sequence[ParameterShare], *, key: str
    ) -> None:
        self._bucket = bucket
        self._partition = partition
        self._shares = shares
        self._pool: BufferPool = means.pool
        self._communicator = means.communicator
        self._key = key
        self._memory: tuple[Lent, Lent] | None = None
        self._gather: OwedCollective[Any] = OwedCollective(self._begin)

    async def run(self, targets: Sequence[Array], *, has_own: bool) -> None:
        """Gather the values into ``targets``, which may have those that this rank owns already."""
        nbytes = self._partition.bucket_nbytes(self._bucket)
        is_over = False
        try:
            row, rows = self._opened()
            await off_loop(partial(self._pack, row.array), nbytes=nbytes)
            await self._gather.run()
            await off_loop(partial(self._unpack, rows.array, targets, has_own), nbytes=nbytes)
            is_over = True
        finally:
            self._close(is_over=is_over)

    def give_up(self) -> None:
        """Abort the gather on all ranks, unless it has begun.  Does not wait."""
        try:
            self._gather.close()
        finally:
            self._close(is_over=False)

    def _opened(self) -> tuple[Lent, Lent]:
        if self._memory is None:
            shape = (self._partition.size, self._bucket.width)
            self._memory = (
                self._pool.take(shape[1:], self._bucket.dtype),
                self._pool.take(shape, self._bucket.dtype),
            )
        return self._memory

    def _begin(self) -> Any:
        row, rows = self._opened()
        return self._communicator.all_gather(row.array, out=rows.array, key=f"{self._key}/{self._bucket.index}")

    def _pack(self, row: Array) -> None:
        for slot in self._bucket.slots:
            pack_own(slot, self._shares[slot.parameter].own_value, row)

    def _unpack(self, rows: Array, targets: Sequence[Array], has_own: bool) -> None:
        own = self._communicator.rank if has_own else None
        ranks = [rank for rank in range(self._partition.size) if rank != own]
        for slot in self._bucket.slots:
            unpack_rows(self._partition, slot, rows, targets[slot.parameter], ranks=ranks)

    def _close(self, *, is_over: bool) -> None:
        if self._memory is not None:
            for lent in self._memory:
                (self._pool.give_back if is_over else self._pool.discard)(lent)
        self._memory = None
