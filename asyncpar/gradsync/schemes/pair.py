"""Codecs whose encoded form cannot be summed, between two ranks: each sends the other all that it has.

Both decode both rows and add them in the order of ranks, so both hold the same bits.  As many bytes travel as between
two owners (see ``owners.py``), but at once instead of in two exchanges that wait for each other, and encoded once:
nothing is lost of the sum, and the work is less by half an encoding.  Among more than two ranks owners send less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.codecs import Bytes, Codec
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import NonFiniteValue
from asyncpar.gradsync.keys import Name
from asyncpar.gradsync.plan import Bucket
from asyncpar.gradsync.schemes.lossy import (
    FINE,
    NON_FINITE,
    Lossy,
    are_fine,
    body_of,
    decoding,
    row_bytes,
    set_status,
)
from asyncpar.gradsync.schemes.scheme import Memory, Place, ReductionStep, scale

PAIR = 2


class Pair(Lossy):
    """The mean of what two ranks sent.

    ``outgoing`` is this rank's encoded row, ``incoming`` those of both.
    """

    is_mean = True

    def __init__(
        self, bucket: Bucket, communicator: Communicator, codec: Codec, *, has_feedback: bool, memory: Memory
    ) -> None:
        assert communicator.size == PAIR, "others have owners"
        super().__init__(bucket, size=PAIR, count=bucket.count, has_feedback=has_feedback, memory=memory)
        self._communicator = communicator
        self._codec = self._drawn = codec
        self._body = body_of(codec, bucket.count)
        self.outgoing: Bytes = memory.shared((row_bytes(self._body),), np.uint8)
        self.incoming: Bytes = np.zeros((PAIR, row_bytes(self._body)), np.uint8)

    def reduction_steps(self, key: Name, place: Place) -> Sequence[ReductionStep]:
        self._drawn = self._codec.at(*place)
        gather = self._communicator.all_gather
        return [ReductionStep(self.encode, lambda: gather(self.outgoing, out=self.incoming, key=f"{key}/both"))]

    def encode(self) -> None:
        """Fill the outgoing row, or say that values are not finite."""
        feedback = self.feedback
        try:
            self._drawn.encode(self.flat, self.outgoing[self._body], residual=feedback.residual, lost=feedback.lost)
        except NonFiniteValue:
            set_status(self.outgoing, NON_FINITE)
        else:
            set_status(self.outgoing, FINE)

    def settle(self) -> None:
        """Decode both rows and take their mean."""
        self.is_finite = are_fine(self.incoming)
        if not self.is_finite:
            return
        with decoding(0, self.bucket):
            self._drawn.decode(self.incoming[0, self._body], self.result)
        with decoding(1, self.bucket):
            self._drawn.decode_add(self.incoming[1, self._body], self.result)
        self.is_finite = scale(self.result, 1 / PAIR)  # the sum of finite values may be infinite

    def buffers(self) -> Iterator[NDArray[Any]]:
        yield from super().buffers()
        yield from (self.outgoing, self.incoming)
