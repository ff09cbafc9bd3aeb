"""Which gradients travel together: pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncpar.errors import UsageError

FIRST_BUCKET_BYTES = 1 << 20
_GROWTH = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSpec:
    """Name, shape and dtype of one gradient."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def count(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place ``start:stop`` of one gradient in its bucket, counted in values."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients of one dtype that are reduced together, in backward order, without gaps."""

    index: int
    dtype: np.dtype[Any]
    slots: tuple[Slot, ...]

    @property
    def count(self) -> int:
        """Number of values."""
        return self.slots[-1].stop

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """All buckets of a model, the one whose gradients are final first in front."""

    specs: tuple[GradientSpec, ...]
    buckets: tuple[Bucket, ...]

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)


def plan_buckets(specs: Sequence[GradientSpec], *, bucket_bytes: int, max_buckets: int) -> BucketPlan:
    """Assign every gradient to exactly one bucket, in reverse registration order.

    A bucket is closed when one more gradient would take it past ``bucket_bytes`` (1 MiB for the first); a gradient that
    is larger stands alone.  Each dtype has buckets of its own.  When that gives more than ``max_buckets``, the limit
    grows until it does not, and the first bucket is no longer special.  Empty gradients are left out.
    """
    _check_specs(specs)
    backward = [spec for spec in reversed(specs) if spec.count]
    dtypes = {spec.dtype for spec in backward}
    if len(dtypes) > max_buckets:
        raise UsageError(f"max_buckets: expected at least {len(dtypes)}, one for each dtype, got {max_buckets}")
    contents = _fill(backward, first_bytes=min(FIRST_BUCKET_BYTES, bucket_bytes), bucket_bytes=bucket_bytes)
    limit = bucket_bytes
    while len(contents) > max_buckets:
        contents = _fill(backward, first_bytes=limit, bucket_bytes=limit)
        limit = int(limit * _GROWTH) + 1
    buckets = tuple(_place(index, content) for index, content in enumerate(contents))
    return BucketPlan(specs=tuple(specs), buckets=buckets)


def _fill(specs: Sequence[GradientSpec], *, first_bytes: int, bucket_bytes: int) -> list[list[GradientSpec]]:
    """Return the gradients of each bucket, buckets in order of their first gradient."""
    contents: list[list[GradientSpec]] = []
    current: dict[np.dtype[Any], tuple[list[GradientSpec], int, int]] = {}
    for spec in specs:
        size = spec.count * spec.dtype.itemsize
        content, used, limit = current.get(spec.dtype, ([], 0, 0))
        if not content or used + size > limit:
            content, used = [], 0
            limit = bucket_bytes if contents else first_bytes
            contents.append(content)
        content.append(spec)
        current[spec.dtype] = (content, used + size, limit)
    return contents


def _place(index: int, specs: Sequence[GradientSpec]) -> Bucket:
    slots: list[Slot] = []
    start = 0
    for spec in specs:
        slots.append(Slot(name=spec.name, start=start, stop=start + spec.count))
        start += spec.count
    return Bucket(index=index, dtype=specs[0].dtype, slots=tuple(slots))


def _check_specs(specs: Sequence[GradientSpec]) -> None:
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise UsageError(f"parameters: two are named {spec.name!r}; names must be unique")
        if not np.issubdtype(spec.dtype, np.floating):
            raise UsageError(f"parameter {spec.name}: expected a gradient of a floating dtype, got {spec.dtype}")
        seen.add(spec.name)
