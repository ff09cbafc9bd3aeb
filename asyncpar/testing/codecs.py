"""The conformance suite of codecs.  Subclass it in a test module and name the codec to test::

class TestMyCodec(CodecConformance):
    def make(self) -> Codec:
        return MyCodec()

``draws_at_random = True`` informs the suite that a codec draws at random, and ``contracts_within`` for which magnitudes
its ``contraction`` is promised.  The suite needs pytest for nothing but collecting it.
"""

from __future__ import annotations

from asyncpar.testing.codec_decoding import CodecDecoding
from asyncpar.testing.codec_encoding import CodecEncoding
from asyncpar.testing.codec_samples import CodecSuite

__all__ = ["CodecConformance", "CodecSuite"]


class CodecConformance(CodecEncoding, CodecDecoding):
    """The promises of every codec.  All values are drawn from fixed seeds."""
