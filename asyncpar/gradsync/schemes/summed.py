"""Codecs whose encoded form can be summed: encode, all-reduce, decode.

A float16 cannot hold every sum of float16 gradients, so those become their mean on the way: each rank's part is divided
first, as ``Communicator.all_reduce`` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.codecs import Bytes, Codec
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import NonFiniteValue, ProtocolError
from asyncpar.gradsync.keys import Name
from asyncpar.gradsync.obligation import Obligation
from asyncpar.gradsync.plan import Bucket
from asyncpar.gradsync.schemes.lossy import Lossy
from asyncpar.gradsync.schemes.memory import Memory
from asyncpar.gradsync.schemes.scheme import Leg, Place


def means_on_the_way(codec: Codec) -> bool:
    """Do the encoded forms of a summable ``codec`` become their mean, and not their sum?"""
    return codec.sum_dtype == np.float16


class Summed(Lossy):
    """The sum of encoded forms, in the codec's ``sum_dtype``; their mean if that is float16."""

    def __init__(
        self,
        bucket: Bucket,
        communicator: Communicator,
        codec: Codec,
        *,
        algorithm: str | None,
        has_feedback: bool,
        memory: Memory,
    ) -> None:
        count = bucket.count
        super().__init__(bucket, size=communicator.size, count=count, has_feedback=has_feedback, memory=memory)
        self._communicator = communicator
        self._algorithm = algorithm
        self._codec = self._drawn = codec
        assert codec.sum_dtype is not None, "the codec is summable"
        self._sum_dtype = codec.sum_dtype
        self._encoded: Bytes = memory.shared((codec.encoded_bytes(count),), np.uint8)

    @property
    def is_mean(self) -> bool:
        return means_on_the_way(self._codec)

    def legs(self, key: Name, place: Place) -> Sequence[Leg]:
        self._drawn = self._codec.at(*place)
        encoded = self._encoded.view(self._sum_dtype)
        reduce, op = self._communicator.all_reduce, "mean" if self.is_mean else "sum"
        return [Leg(self._encode, Obligation(lambda: reduce(encoded, op, algorithm=self._algorithm, key=str(key))))]

    def settle(self) -> None:
        try:
            self._drawn.decode(self._encoded, self.result)
        except ProtocolError:  # its length is right, so NaN or infinity is all that a sum can be refused for
            self.is_finite = False
        else:
            self.is_finite = True

    def spoil(self) -> None:
        super().spoil()
        self._encoded.view(self._sum_dtype).fill(np.nan)

    def buffers(self) -> Iterator[NDArray[Any]]:
        yield from super().buffers()
        yield self._encoded

    def _encode(self) -> None:
        feedback = self.feedback
        try:
            self._drawn.encode(self.flat, self._encoded, residual=feedback.residual, lost=feedback.lost)
        except NonFiniteValue:
            self._encoded.view(self._sum_dtype).fill(np.nan)
