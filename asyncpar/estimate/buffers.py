"""Memory of a rank for communication: buckets, their encoding buffers, and gathered parameters.  Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from asyncpar.codecs import AnyCodec, Identity, RoundCodec
from asyncpar.codecs.rows import RowFormat
from asyncpar.core.array_pool import LEAST_BYTES
from asyncpar.core.config.slicing import ceil_div
from asyncpar.estimate.job import Shapes
from asyncpar.gradsync.config import GradientCompressionConfig
from asyncpar.zero.config import MIB, ZeROConfig
from asyncpar.zero.partition import (
    Partition,
    Spec,
    encoded_bytes,
    gather_bytes,
    make_budget,
    make_partition,
    most_gathered,
    usual_widths,
)

_PAIR = 2
_SINGLE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferBytes:
    """Bytes of one rank besides values, gradients and states.

    ``buckets`` persist between steps; ``waiting`` is the idle memory of whole gradients and gathered values, to be
    reused; ``gathered`` is the most that ZeRO stage 3 gathers in a step; ``residuals`` are those of error feedback.
    """

    buckets: float = 0.0
    waiting: float = 0.0
    gathered: float = 0.0
    residuals: float = 0.0


@lru_cache(maxsize=4096)
def sharded_buffers(
    layers: Sequence[Shapes], replicas: int, zero: ZeROConfig, dtype: str, *, runs: int = 1
) -> BufferBytes:
    """Return the buffers of ZeRO with settings ``zero`` on each of ``replicas`` ranks with parameters like ``layers``.

    Layers are those that stage 3 gathers one by one, in ``runs``: see ``most_gathered``.
    """
    shapes = [shape for layer in layers for shape in layer]
    nbytes = sum(map(math.prod, shapes)) * np.dtype(dtype).itemsize
    partition = _partition(shapes, replicas, zero, nbytes, dtype)
    extra = encoded_bytes if zero.gradient_compression else _nothing
    largest = max(map(partition.bucket_nbytes, partition.buckets), default=0)
    roomy = replace(zero, max_memory_usage_mb=max(zero.max_memory_usage_mb, 4 * largest / MIB))
    budget = make_budget(partition, zero if roomy == zero else roomy, extra)
    waiting, gathered = 0.0, 0.0
    if zero.stage.shards_gradients:
        pooled = sum(count for count in _sizes(shapes, dtype) if count >= LEAST_BYTES)
        waiting = min(zero.idle_bytes_of(nbytes), pooled)
    if zero.stage.shards_parameters:
        widths = tuple(usual_widths(partition, zero).items())
        units = [_unit_bytes(layer, replicas, zero, nbytes, dtype, widths) for layer in layers]
        gathered = min(budget.rest, most_gathered(units, zero.prefetch_depth, runs))
    keeps_lost = zero.gradient_compression and zero.error_feedback and replicas > 1
    sent = sum((partition.size - 1) * bucket.width for bucket in partition.buckets)
    return BufferBytes(
        buckets=budget.buffers,
        waiting=waiting,
        gathered=gathered,
        residuals=2 * _SINGLE * sent if keeps_lost else 0,
    )


def reduced_buffers(
    layers: Sequence[Shapes], replicas: int, compression: GradientCompressionConfig, dtype: str
) -> BufferBytes:
    """Return the memory for gradients that all replicas reduce whole: a copy of them, and the codec's buffers.

    This is for codecs within one host; between hosts alone they take less.  ``"auto"`` counts as no codec.
    """
    shapes = [shape for layer in layers for shape in layer]
    count = sum(map(math.prod, shapes))
    is_plain = replicas == 1 or not compression.is_enabled or compression.is_automatic
    codec = Identity() if is_plain else compression.make_codec()
    if isinstance(codec, Identity):
        return BufferBytes(buckets=count * np.dtype(dtype).itemsize)
    residuals = 2 * _SINGLE * count if compression.error_feedback else 0
    encoded = _encoded_bytes(codec, shapes, replicas, has_feedback=compression.error_feedback)
    return BufferBytes(buckets=_SINGLE * count + encoded, residuals=residuals)


def _encoded_bytes(codec: AnyCodec, shapes: Sequence[tuple[int, ...]], replicas: int, *, has_feedback: bool) -> int:
    count = sum(map(math.prod, shapes))
    if isinstance(codec, RoundCodec):
        return codec.encoder(shapes).nbytes + (_SINGLE * count if has_feedback else 0)  # including the corrected values
    if codec.is_summable:
        return codec.encoded_bytes(count)
    if replicas == _PAIR:
        return (1 + _PAIR) * RowFormat(codec, count).nbytes
    shard = ceil_div(count, replicas)
    return (2 * replicas + 1) * RowFormat(codec, shard).nbytes + _SINGLE * shard * (2 if has_feedback else 1)


def _partition(
    shapes: Sequence[tuple[int, ...]], replicas: int, zero: ZeROConfig, nbytes: int, dtype: str
) -> Partition:
    specs = [Spec(name=str(index), shape=shape, dtype=np.dtype(dtype)) for index, shape in enumerate(shapes)]
    return make_partition(
        specs, replicas, bucket_bytes=zero.bucket_bytes_of(nbytes), most_values=zero.reduce_bucket_size
    )


@lru_cache(maxsize=4096)
def _unit_bytes(
    layer: Shapes,
    replicas: int,
    zero: ZeROConfig,
    nbytes: int,
    dtype: str,
    widths: tuple[tuple[np.dtype[np.generic], range], ...],
) -> int:
    whole = replace(zero, reduce_bucket_size=1 << 62)  # gathers cut nothing
    return gather_bytes(_partition(layer, replicas, whole, nbytes, dtype), dict(widths))


def _sizes(shapes: Sequence[tuple[int, ...]], dtype: str) -> list[int]:
    return [math.prod(shape) * np.dtype(dtype).itemsize for shape in shapes]


def _nothing(rows: int, width: int, dtype: object) -> int:  # noqa: ARG001  # it is an ``ExtraBytes``
    return 0
