"""Settings of gradient synchronization."""

from __future__ import annotations

import math
from dataclasses import dataclass

from asyncpar.errors import UsageError

_TOP_K_FRACTION = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientBucketingConfig:
    """How gradients are fused.

    ``bucket_size_mb`` (MiB) is the most that a bucket of several gradients holds; the first bucket holds at most 1 MiB,
    so that communication starts early.  Should that make more than ``max_buckets``, buckets grow until it does not.
    ``overlap_communication`` off means: one bucket after another, when all gradients are final.
    """

    bucket_size_mb: float = 25.0
    max_buckets: int = 16
    overlap_communication: bool = True

    def __post_init__(self) -> None:
        if not (self.bucket_size_mb > 0.0 and math.isfinite(self.bucket_size_mb)):
            raise UsageError(f"bucket_size_mb: expected a positive number of MiB, got {self.bucket_size_mb}")
        if self.max_buckets < 1:
            raise UsageError(f"max_buckets: expected 1 or more, got {self.max_buckets}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientCompressionConfig:
    """Lossy compression, off unless asked for.

    With ``enable_compression`` each value is sent as an integer of ``quantization_bits`` (8, see ``codecs.Int8``), and
    with ``error_feedback`` what rounding lost is added to the next step's gradient.  Top-k selection is not offered in
    this version, so ``compression_ratio``, the fraction that it would keep, must be left alone.
    """

    enable_compression: bool = False
    compression_ratio: float = _TOP_K_FRACTION
    error_feedback: bool = True
    quantization_bits: int = 8

    def __post_init__(self) -> None:
        if self.quantization_bits != 8:
            raise UsageError(f"quantization_bits: expected 8, the only width so far, got {self.quantization_bits}")
        if self.compression_ratio != _TOP_K_FRACTION:
            raise UsageError(
                f"compression_ratio: top-k selection is not available yet, expected the default {_TOP_K_FRACTION}, "
                f"got {self.compression_ratio}"
            )
