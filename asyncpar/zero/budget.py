"""How much may be under way at a time.  Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncpar.zero.config import MIB, ZeROConfig
from asyncpar.zero.errors import MemoryExceeded
from asyncpar.zero.partition import Partition

ExtraBytes = Callable[[int, int, np.dtype[Any]], int]
"""What summing so many rows of that width and dtype takes besides the rows; see ``RowSums.extra_bytes``."""

_MOST_BUCKETS = 4
"""More buckets at a time are no quicker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """``window`` buckets at a time, which take ``buffers`` bytes, and ``rest`` bytes for gathered parameters."""

    window: int
    buffers: int
    rest: int


def make_budget(partition: Partition, config: ZeROConfig, extra_bytes: ExtraBytes) -> Budget:
    """Divide ``max_memory_usage_mb``.  Raises ``MemoryExceeded`` when not even one bucket fits."""
    if partition.size == 1 or not partition.buckets:
        return Budget(window=_MOST_BUCKETS, buffers=0, rest=config.most_bytes)
    largest = max(
        partition.bucket_nbytes(bucket) * (partition.size + 1) // partition.size
        + extra_bytes(partition.size, bucket.width, bucket.dtype)
        for bucket in partition.buckets
    )
    if largest > config.most_bytes:
        raise MemoryExceeded(
            f"max_memory_usage_mb: expected room for {largest / MIB:.3g} MiB, the largest bucket, got "
            f"{config.max_memory_usage_mb:g}; lower bucket_size_mb or reduce_bucket_size"
        )
    share = config.most_bytes // 4 if config.stage.shards_parameters else config.most_bytes
    window = min(max(share // largest, 1), _MOST_BUCKETS)
    buffers = min(window, len(partition.buckets)) * largest
    return Budget(window=window, buffers=buffers, rest=config.most_bytes - window * largest)
