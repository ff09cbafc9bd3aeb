"""Parameters that are gathered and released together: stage 3."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncpar.collectives.bridge import Pending
from asyncpar.nn.parameter import Array
from asyncpar.zero.gathering import BucketGather
from asyncpar.zero.partition import Partition, make_partition
from asyncpar.zero.reduction import Means


class Unit:
    """The parameters ``members``, in buckets of their own.

    ``name`` is that of the unit on all replicas.  ``holders`` counts who uses the values, ``pending`` are those that
    are on their way.  ``arrived`` counts bytes of values that are here, but not in the parameters yet; they are there
    while it ``is_home``.
    """

    def __init__(self, name: str, members: Sequence[int], means: Means) -> None:
        self.name = name
        self.shares = [means.shares[member] for member in members]
        self.partition: Partition = make_partition(
            [means.partition.specs[member] for member in members],
            means.partition.size,
            bucket_bytes=means.config.bucket_bytes,
        )
        self.holders = 0
        self.pending: Pending[list[Array]] | None = None
        self.arrived = 0
        self.is_home = False
        self._means = means

    @property
    def value_nbytes(self) -> int:
        """Bytes of the whole values."""
        return sum(spec.count * spec.dtype.itemsize for spec in self.partition.specs)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes to gather the values, one bucket at a time."""
        rows = max(map(self.partition.bucket_nbytes, self.partition.buckets), default=0)
        return self.value_nbytes + rows + rows // self.partition.size

    @property
    def is_busy(self) -> bool:
        """Does it take memory?"""
        return self.holders > 0 or self.pending is not None

    async def gather(self) -> list[Array]:
        """Return the flat values of its parameters."""
        values: list[Array] = [np.empty(spec.count, spec.dtype) for spec in self.partition.specs]
        if self.partition.size == 1:
            for share, value in zip(self.shares, values, strict=True):
                value[...] = share.own_value
            return values
        for gather in self.gathers():
            await gather.run(values, has_own=False)
        return values

    def gathers(self) -> list[BucketGather]:
        """Return what the next gather consists of."""
        key = f"{self._means.key()}/unit/{self.name}"
        return [
            BucketGather(bucket, self._means, self.partition, self.shares, key=key) for bucket in self.partition.buckets
        ]
