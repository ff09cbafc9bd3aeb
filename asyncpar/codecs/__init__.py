"""Codecs: arrays to bytes and back, pure numpy.  Start with ``codec.py``."""

from asyncpar.codecs.codec import Bytes, Codec, RoundCodec, RoundEncoder, Values
from asyncpar.codecs.identity import Identity
from asyncpar.codecs.int8 import Int8

__all__ = ["Bytes", "Codec", "Identity", "Int8", "RoundCodec", "RoundEncoder", "Values"]
