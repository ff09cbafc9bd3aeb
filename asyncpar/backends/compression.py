"""Compression of values on the wire in users' terms: kinds with a number, which stand for codecs.  Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

from asyncpar.codecs import Codec, codec_of_bits, parse_codec, value_bits
from asyncpar.core.config.names import CodecName
from asyncpar.errors import UsageError

_AS_IT_IS = 32
"""Bits of a value that is not encoded."""


class CompressionKind(enum.StrEnum):
    """The kinds of compression."""

    NONE = "none"
    TOP_K = "top_k"
    RANDOM = "random"
    QUANTIZATION = "quantization"
    CUSTOM = "custom"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionAlgorithm:
    """A compression with its number, by default none.  Create one with ``top_k(k)``, ``quantization(bits)`` and so on.

    ``kind`` determines which of ``k``, ``ratio``, ``bits`` and ``codec`` applies.
    """

    kind: CompressionKind = CompressionKind.NONE
    k: int = 0
    ratio: float = 1.0
    bits: int = 32
    codec: Codec | None = None

    def __post_init__(self) -> None:
        for owner, name, nothing in (
            (CompressionKind.TOP_K, "k", 0),
            (CompressionKind.RANDOM, "ratio", 1.0),
            (CompressionKind.QUANTIZATION, "bits", 32),
            (CompressionKind.CUSTOM, "codec", None),
        ):
            if self.kind is not owner and getattr(self, name) != nothing:
                raise UsageError(f"{name}: {self.kind} has no use for it, got {getattr(self, name)!r}")
        match self.kind:
            case CompressionKind.TOP_K if self.k < 1:
                raise UsageError(f"k: expected a number of values, at least 1, got {self.k}")
            case CompressionKind.RANDOM if not 0 < self.ratio <= 1:
                raise UsageError(f"ratio: expected a fraction above 0 and up to 1, got {self.ratio}")
            case CompressionKind.QUANTIZATION if self.bits not in value_bits():
                raise UsageError(f"bits: expected one of {', '.join(map(str, value_bits()))}, got {self.bits}")
            case CompressionKind.CUSTOM if not isinstance(self.codec, Codec):
                raise UsageError(f"codec: expected a Codec, got {self.codec!r}")

    @classmethod
    def none(cls) -> CompressionAlgorithm:
        """Send values unchanged."""
        return cls()

    @classmethod
    def top_k(cls, k: int) -> CompressionAlgorithm:
        """Send about the ``k`` values of largest magnitude of each array."""
        return cls(kind=CompressionKind.TOP_K, k=k)

    @classmethod
    def random(cls, ratio: float) -> CompressionAlgorithm:
        """Send this fraction of the values of each array, at the same places on all ranks, others in each operation.

        They are divided by it, so that results are unbiased over operations.
        """
        return cls(kind=CompressionKind.RANDOM, ratio=ratio)

    @classmethod
    def quantization(cls, bits: int) -> CompressionAlgorithm:
        """Send values in 1 (sign), 4, 8, 16 (bfloat16) or 32 bits (unchanged)."""
        return cls(kind=CompressionKind.QUANTIZATION, bits=bits)

    @classmethod
    def custom(cls, codec: CodecName | Codec) -> CompressionAlgorithm:
        """Send values encoded by ``codec``, which may be a name, such as ``topk:0.01+int8``."""
        if isinstance(codec, str):
            codec = _vector_codec(codec)
        return cls(kind=CompressionKind.CUSTOM, codec=codec)

    NONE: ClassVar[CompressionAlgorithm]
    TOP_K = top_k
    RANDOM = random
    QUANTIZATION = quantization

    def codec_for(self, count: int) -> Codec | None:
        """Return the codec for arrays of ``count`` values; None: they are sent unchanged."""
        match self.kind:
            case CompressionKind.TOP_K if self.k < count:
                return _vector_codec(f"topk:{self.k / count!r}")
            case CompressionKind.RANDOM if self.ratio < 1:
                return _vector_codec(f"randomk:{self.ratio!r}")
            case CompressionKind.QUANTIZATION if self.bits != _AS_IT_IS:
                return _vector_codec(codec_of_bits(self.bits))
            case _:
                return self.codec


CompressionAlgorithm.NONE = CompressionAlgorithm()


def _vector_codec(name: str) -> Codec:
    codec = parse_codec(name)
    if not isinstance(codec, Codec):
        raise UsageError(f"codec: expected one that encodes vectors, got {name!r}, which works in rounds")
    return codec
