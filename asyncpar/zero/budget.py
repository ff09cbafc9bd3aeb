"""How much may be under way at a time.  Pure."""

from __future__ import annotations

from dataclasses import dataclass

from asyncpar.zero.config import MIB, ZeROConfig
from asyncpar.zero.errors import MemoryExceeded
from asyncpar.zero.partition import Partition

_MOST_BUCKETS = 4
"""More buckets at a time are no quicker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """``window`` buckets at a time, and ``rest`` bytes for gathered parameters."""

    window: int
    rest: int


def make_budget(partition: Partition, config: ZeROConfig) -> Budget:
    """Divide ``max_memory_usage_mb``.  Raises ``MemoryExceeded`` when not even one bucket fits."""
    if partition.size == 1 or not partition.buckets:
        return Budget(window=_MOST_BUCKETS, rest=config.most_bytes)
    largest = max(
        partition.bucket_nbytes(bucket) * (partition.size + 1) // partition.size for bucket in partition.buckets
    )
    if config.gradient_compression:
        largest *= 2  # encoded rows, which go and come
    if largest > config.most_bytes:
        raise MemoryExceeded(
            f"max_memory_usage_mb: expected room for {largest / MIB:.3g} MiB, the largest bucket, got "
            f"{config.max_memory_usage_mb:g}; lower bucket_size_mb or reduce_bucket_size"
        )
    share = config.most_bytes // 4 if config.stage.shards_parameters else config.most_bytes
    window = min(max(share // largest, 1), _MOST_BUCKETS)
    return Budget(window=window, rest=config.most_bytes - window * largest)
