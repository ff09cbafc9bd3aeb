"""The codecs of the package keep the promises of all codecs."""

from __future__ import annotations

from asyncpar.codecs import Cast, Codec, Identity, Int4, Int8, RandomK, Sign, TopK
from asyncpar.testing.codecs import CodecConformance


class TestIdentity(CodecConformance):
    def make(self) -> Codec:
        return Identity()


class TestInt8(CodecConformance):
    def make(self) -> Codec:
        return Int8()


class TestBfloat16(CodecConformance):
    def make(self) -> Codec:
        return Cast("bfloat16")


class TestFloat16(CodecConformance):
    contracts_within = (2.0**-11, 65504.0)

    def make(self) -> Codec:
        return Cast("float16")


class TestInt4(CodecConformance):
    def make(self) -> Codec:
        return Int4()


class TestSign(CodecConformance):
    def make(self) -> Codec:
        return Sign()


class TestTopK(CodecConformance):
    def make(self) -> Codec:
        return TopK(0.01)


class TestTopKInInt8(CodecConformance):
    def make(self) -> Codec:
        return TopK(0.1, Int8())


class TestTopKInInt4(CodecConformance):
    def make(self) -> Codec:
        return TopK(0.05, Int4())


class TestTopKOfSigns(CodecConformance):
    def make(self) -> Codec:
        return TopK(0.2, Sign())


class TestTopKInFloat16(CodecConformance):
    contracts_within = (2.0**-11, 65504.0)

    def make(self) -> Codec:
        return TopK(0.1, Cast("float16"))


class TestRandomK(CodecConformance):
    draws_at_random = True

    def make(self) -> Codec:
        return RandomK(0.1)


class TestRandomKInBfloat16(CodecConformance):
    draws_at_random = True

    def make(self) -> Codec:
        return RandomK(0.3, seed=3, values=Cast("bfloat16"))


class TestRandomKOfTopK(CodecConformance):
    draws_at_random = True

    def make(self) -> Codec:
        return RandomK(0.5, values=TopK(0.2))


class TestTopKOfRandomKInInt4(CodecConformance):
    draws_at_random = True

    def make(self) -> Codec:
        return TopK(0.2, RandomK(0.5, values=Int4()))
