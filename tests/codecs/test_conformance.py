"""The codecs of the package keep the promises of all codecs."""

from __future__ import annotations

from asyncpar.codecs import Codec, Identity, Int8
from asyncpar.testing.codecs import CodecConformance


class TestIdentity(CodecConformance):
    def make(self) -> Codec:
        return Identity()


class TestInt8(CodecConformance):
    def make(self) -> Codec:
        return Int8()
