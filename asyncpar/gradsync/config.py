"""Settings of gradient synchronization."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from asyncpar.codecs import AnyCodec, Codec, RoundCodec, codec_of_bits, parse_codec, value_bits
from asyncpar.core.config.names import CodecChoice
from asyncpar.errors import UsageError

AUTO = "auto"
"""Name of the codec that is chosen by measured speeds, the same on all ranks."""


class NonFinitePolicy(StrEnum):
    """The action of all ranks in a step in which a gradient of some rank is NaN or infinite.

    ABORT: raise ``NonFiniteValue``.  SKIP_STEP: leave gradients unchanged and report it in the step's outcome.  DROP:
    exclude the ranks with such gradients from the bucket's mean; if that leaves no rank, or if finite gradients have an
    infinite sum, raise as ABORT does.
    """

    ABORT = "abort"
    SKIP_STEP = "skip_step"
    DROP = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientBucketingConfig:
    """Settings of the fusion of gradients into buckets.

    ``bucket_size_mb`` (MiB) limits a bucket of several gradients; the first bucket holds at most 1 MiB, so that
    communication starts early.  If that makes more than ``max_buckets``, buckets grow until it does not.  Without
    ``overlap_communication`` buckets are reduced one after another, once all gradients are final.

    With ``gradient_as_bucket_view`` gradients are views into the buckets and are not copied: every step replaces each
    parameter's ``grad`` by another array, so do not keep the old one.  It requires gradients of the bucket's own dtype,
    which is float32 with a codec.
    """

    bucket_size_mb: float = 25.0
    max_buckets: int = 16
    overlap_communication: bool = True
    gradient_as_bucket_view: bool = False

    def __post_init__(self) -> None:
        if not (self.bucket_size_mb > 0.0 and math.isfinite(self.bucket_size_mb)):
            raise UsageError(f"bucket_size_mb: expected a positive number of MiB, got {self.bucket_size_mb}")
        if self.max_buckets < 1:
            raise UsageError(f"max_buckets: expected 1 or more, got {self.max_buckets}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientCompressionConfig:
    """Lossy compression, off by default.

    With ``enable_compression`` the fraction ``compression_ratio`` of largest values is sent (1: all of them), each in
    ``quantization_bits``: 32 (unchanged), 16 (bfloat16), 8, 4 or 1 (sign).  ``codec`` is the alternative, and also
    enables compression: a name that ``codecs.parse_codec`` knows, ``"auto"``, or a codec.  With ``error_feedback`` the
    compression error is added to the next step's gradient.
    """

    enable_compression: bool = False
    compression_ratio: float = 0.1
    error_feedback: bool = True
    quantization_bits: int = 8
    codec: CodecChoice | AnyCodec | None = None

    def __post_init__(self) -> None:
        if self.quantization_bits not in value_bits():
            widths = ", ".join(map(str, value_bits()))
            raise UsageError(f"quantization_bits: expected one of {widths}, got {self.quantization_bits}")
        if not 0.0 < self.compression_ratio <= 1.0:
            raise UsageError(f"compression_ratio: expected 0 < ratio <= 1, got {self.compression_ratio}")
        if isinstance(self.codec, str) and self.codec != AUTO:
            parse_codec(self.codec)
        if not isinstance(self.codec, str | Codec | RoundCodec | None):
            raise UsageError(f"codec: expected the name of one, or a codec, got {self.codec!r}")

    @property
    def is_enabled(self) -> bool:
        """Whether a codec is requested at all."""
        return self.enable_compression or self.codec is not None

    @property
    def is_automatic(self) -> bool:
        """Whether the codec is chosen by measurement."""
        return self.codec == AUTO

    def make_codec(self) -> AnyCodec:
        """Return the configured codec; not for ``"auto"``."""
        if isinstance(self.codec, str):
            return parse_codec(self.codec)
        if self.codec is not None:
            return self.codec
        return parse_codec(self.codec_name)

    @property
    def codec_name(self) -> str:
        """The name of the codec: ``"none"`` without compression."""
        if isinstance(self.codec, str):
            return self.codec
        if self.codec is not None:
            return self.codec.name
        if not self.enable_compression:
            return "none"
        values = codec_of_bits(self.quantization_bits)
        if self.compression_ratio == 1.0:
            return values
        selection = f"topk:{self.compression_ratio:g}"
        return selection if values == "none" else f"{selection}+{values}"

    def __str__(self) -> str:
        return f"codec {self.codec_name}, error feedback {'on' if self.error_feedback else 'off'}"
