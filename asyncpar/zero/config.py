"""Settings of sharded training.  Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from asyncpar.core.config.checks import DefaultInt, is_default
from asyncpar.core.config.names import ReduceScatterAlgorithm
from asyncpar.core.config.strategies import ZeROStage
from asyncpar.errors import UsageError

MIB = 1 << 20
_BUCKETS = 16
_ROOM_SHARE = 8
_LEAST_ROOM = 8 * MIB
"""Room for buckets in progress that a model of any size may use."""

_LEAST_IDLE = 32 * MIB
"""Memory that may stay idle between steps of a model of any size: a small one has no need to save it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeROConfig:
    """Settings of the transfer of gradients and parameters between replicas, and of the memory of each replica.

    - ``bucket_size_mb``: gradients are reduced, and parameters gathered after the step, in buckets of up to this size,
      and of up to a sixteenth of the parameters, or 1 MiB; a larger parameter has its own bucket.
    - ``reduce_bucket_size``: limit of values in one bucket; larger parameters are cut.
    - ``overlap_comm``: a bucket is reduced as soon as the backward pass is done with it, else at the end of the pass.
    - ``prefetch_depth``: layers of stage 3 whose parameters are gathered ahead of the current one; in
      other stages anything but the default is refused.
    - ``max_memory_usage_mb``: limit of memory for buckets in progress and gathered parameters.  Less runs so as to stay
      within it; what does not fit by itself raises ``MemoryExceeded``.  If set, as much may stay idle between steps;
      by default that is an eighth of the parameters, or 32 MiB, so that it does not take what sharding saves.
    - ``gradient_compression``: gradients are sent as 8-bit integers with a scale per 1,024 values, a quarter of the
      bytes, with a rounding error (as in ZeRO++, Wang et al. 2023).
    - ``error_feedback``: that rounding error is added to the next step's gradients, so that it does not accumulate
      over steps.  Takes 8 bytes for each value that is sent, which other ranks own, on each rank that compresses, in
      all stages.
    - ``pin_memory``: buckets lie in memory that the ranks of a host share, if there is any, and are reused, and
      so is memory of whole gradients and gathered parameters; else each is allocated and freed.
    - ``average``: gradients become their mean over the replicas, else their sum.
    - ``algorithm``: name of the algorithm that reduces buckets; None: the fastest.
    """

    stage: ZeROStage = ZeROStage.STAGE1
    bucket_size_mb: float = 25
    overlap_comm: bool = True
    reduce_bucket_size: int = 500_000_000
    prefetch_depth: int = 2
    max_memory_usage_mb: float = DefaultInt(1024)
    gradient_compression: bool = False
    error_feedback: bool = True
    pin_memory: bool = True
    average: bool = True
    algorithm: ReduceScatterAlgorithm | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.stage, ZeROStage):
            raise UsageError(f"stage: expected a ZeROStage, one of {', '.join(ZeROStage)}, got {self.stage!r}")
        for name in ("bucket_size_mb", "max_memory_usage_mb"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UsageError(f"{name}: expected a positive number, got {getattr(self, name)!r}")
        _check_count("reduce_bucket_size", self.reduce_bucket_size, least=1)
        _check_count("prefetch_depth", self.prefetch_depth, least=0)
        if not self.stage.shards_parameters:
            self.check_unused(("prefetch_depth",), f"as parameters are whole in {self.stage}")
        if self.gradient_compression and self.algorithm is not None:
            raise UsageError(
                f"algorithm: expected None with gradient_compression, which has its own, got {self.algorithm!r}"
            )

    def check_unused(self, names: Iterable[str], why: str) -> None:
        """Raise ``UsageError`` if a setting among ``names``, which would have no effect, is not the default."""
        for field in fields(self):
            if field.name in names and getattr(self, field.name) != field.default:
                raise UsageError(
                    f"{field.name} of ZeROConfig: expected {field.default!r}, {why}, got {getattr(self, field.name)!r}"
                )

    @property
    def bucket_bytes(self) -> int:
        """``bucket_size_mb`` in bytes."""
        return max(1, int(self.bucket_size_mb * MIB))

    @property
    def most_bytes(self) -> int:
        """``max_memory_usage_mb`` in bytes."""
        return int(self.max_memory_usage_mb * MIB)

    def bucket_bytes_of(self, nbytes: int) -> int:
        """Return the largest size in bytes of a bucket of parameters that take ``nbytes``: small beside the savings."""
        return min(self.bucket_bytes, max(MIB, nbytes // _BUCKETS))

    def idle_bytes_of(self, nbytes: int) -> int:
        """Return how many bytes may stay idle between steps for gradients and gathered values of such parameters."""
        if not self.pin_memory:
            return 0
        follows = is_default(self.max_memory_usage_mb)
        return min(self.most_bytes, max(_LEAST_IDLE, nbytes // _ROOM_SHARE)) if follows else self.most_bytes

    def buffer_bytes_of(self, nbytes: int) -> int:
        """Return how many bytes buckets in progress may take, as long as that is room for two."""
        return min(self.most_share, max(_LEAST_ROOM, nbytes // _ROOM_SHARE))

    @property
    def most_share(self) -> int:
        """The largest part of ``most_bytes`` for buckets in progress, if it has room for one."""
        return self.most_bytes // 4 if self.stage.shards_parameters else self.most_bytes


def _check_count(name: str, number: object, *, least: int) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise UsageError(f"{name}: expected an integer of at least {least}, got {number!r}")
