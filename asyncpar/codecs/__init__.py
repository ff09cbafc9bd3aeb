"""Codecs: arrays to bytes and back, pure numpy.  Start with ``codec.py``; add new ones in ``registry.py``."""

from asyncpar.codecs.cast import Cast
from asyncpar.codecs.codec import Bytes, Codec, RoundCodec, RoundEncoder, Values
from asyncpar.codecs.identity import Identity
from asyncpar.codecs.int4 import Int4
from asyncpar.codecs.int8 import Int8
from asyncpar.codecs.powersgd import PowerSgd
from asyncpar.codecs.random_k import RandomK
from asyncpar.codecs.registry import (
    CODECS,
    AnyCodec,
    CodecKind,
    automatic_codecs,
    chain,
    codec_forms,
    codec_of_bits,
    parse_codec,
    register_codec,
    unregister_codec,
    value_bits,
)
from asyncpar.codecs.sign import Sign
from asyncpar.codecs.top_k import TopK

__all__ = [
    "CODECS",
    "AnyCodec",
    "Bytes",
    "Cast",
    "Codec",
    "CodecKind",
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
    "automatic_codecs",
    "chain",
    "codec_forms",
    "codec_of_bits",
    "parse_codec",
    "register_codec",
    "unregister_codec",
    "value_bits",
]
