"""Codecs: arrays to bytes and back, pure numpy.  Start with ``codec.py``."""

from asyncpar.codecs.cast import Cast
from asyncpar.codecs.codec import Bytes, Codec, RoundCodec, RoundEncoder, Values
from asyncpar.codecs.identity import Identity
from asyncpar.codecs.int4 import Int4
from asyncpar.codecs.int8 import Int8
from asyncpar.codecs.naming import chain, parse_codec
from asyncpar.codecs.powersgd import PowerSgd
from asyncpar.codecs.random_k import RandomK
from asyncpar.codecs.sign import Sign
from asyncpar.codecs.top_k import TopK

__all__ = [
    "Bytes",
    "Cast",
    "Codec",
    "Identity",
    "Int4",
    "Int8",
    "PowerSgd",
    "RandomK",
    "RoundCodec",
    "RoundEncoder",
    "Sign",
    "TopK",
    "Values",
    "chain",
    "parse_codec",
]
