"""Schemes of codecs whose encoded form cannot be summed.

``ShardedReduce``: owners decode, add and encode: see ``codecs.rows``.  What the first encoding loses goes into the
residual of the rank that lost it, and what the second loses into the residual of the owner, which adds it to the same
sum in the next step.  So one residual per parameter and rank is all the state there is, whichever bucket or shard a
parameter is in.

``Pair``: between two ranks each sends the other its whole vector.  Both decode both rows and add them in the order of
ranks, so both hold the same bits.  As many bytes travel as between two owners, but in one exchange instead of two that
wait for each other, and encoded once: nothing is lost of the sum, and the work is less by half an encoding.  Among more
than two ranks owners send less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.codecs import Bytes, Codec
from asyncpar.codecs.rows import RowFormat, ShardedSum, are_finite
from asyncpar.collectives.communicator import Communicator
from asyncpar.gradsync.groups import Name
from asyncpar.gradsync.plan import Bucket
from asyncpar.gradsync.schemes.scheme import Lossy, Place, ReductionStep, SchemeMemory, scale


class ShardedReduce(Lossy):
    """The sum of decoded shards, by their owners.

    ``outgoing`` and ``incoming`` hold one encoded row per rank, ``owned`` the row of this rank's sum.
    """

    is_mean = False

    def __init__(
        self, bucket: Bucket, communicator: Communicator, codec: Codec, *, has_feedback: bool, memory: SchemeMemory
    ) -> None:
        self._sum = ShardedSum(
            codec,
            bucket.count,
            rank=communicator.rank,
            size=communicator.size,
            keeps_lost=has_feedback,
            shared=memory.shared,
        )
        count = self._sum.padded_count
        super().__init__(bucket, size=communicator.size, count=count, has_feedback=has_feedback, memory=memory)
        self._communicator = communicator
        self.outgoing, self.incoming, self.owned = self._sum.outgoing, self._sum.incoming, self._sum.owned

    def reduction_steps(self, key: Name, place: Place) -> Sequence[ReductionStep]:
        self._sum.draw(*place)
        exchange, gather = self._communicator.all_to_all, self._communicator.all_gather
        return [
            ReductionStep(self.encode, lambda: exchange(self.outgoing, out=self.incoming, key=f"{key}/shards")),
            ReductionStep(self.sum_owned, lambda: gather(self.owned, out=self.incoming, key=f"{key}/sums")),
        ]

    def encode(self) -> None:
        """Fill the outgoing rows."""
        self.flat[self.bucket.count :] = 0.0  # decoding may have written to the padding
        self._sum.encode(self.flat, residual=self.feedback.residual, lost=self.feedback.lost)

    def sum_owned(self) -> None:
        """Add the incoming rows and encode the sum."""
        self.is_finite = self._sum.sum_owned(what=self.bucket, lost=self.feedback.lost)

    def settle(self) -> None:
        """Decode the sums of all owners."""
        self.is_finite = self._sum.decode(self.result, what=self.bucket)

    def buffers(self) -> Iterator[NDArray[Any]]:
        yield from super().buffers()
        yield from self._sum.arrays


PAIR = 2


class Pair(Lossy):
    """The mean of the vectors of two ranks.

    ``outgoing`` is this rank's encoded row, ``incoming`` those of both.
    """

    is_mean = True

    def __init__(
        self, bucket: Bucket, communicator: Communicator, codec: Codec, *, has_feedback: bool, memory: SchemeMemory
    ) -> None:
        assert communicator.size == PAIR, "others have owners"
        super().__init__(bucket, size=PAIR, count=bucket.count, has_feedback=has_feedback, memory=memory)
        self._communicator = communicator
        self._format = self._drawn = RowFormat(codec, bucket.count)
        self.outgoing: Bytes = memory.shared((self._format.nbytes,), np.uint8)
        self.incoming: Bytes = np.zeros((PAIR, self._format.nbytes), np.uint8)

    def reduction_steps(self, key: Name, place: Place) -> Sequence[ReductionStep]:
        self._drawn = self._format.at(*place)
        gather = self._communicator.all_gather
        return [ReductionStep(self.encode, lambda: gather(self.outgoing, out=self.incoming, key=f"{key}/both"))]

    def encode(self) -> None:
        """Fill the outgoing row."""
        self._drawn.encode(self.flat, self.outgoing, residual=self.feedback.residual, lost=self.feedback.lost)

    def settle(self) -> None:
        """Decode both rows and take their mean."""
        self.is_finite = are_finite(self.incoming)
        if self.is_finite:
            self._drawn.decode(self.incoming, 0, self.result, adds=False, what=self.bucket)
            self._drawn.decode(self.incoming, 1, self.result, adds=True, what=self.bucket)
            self.is_finite = scale(self.result, 1 / PAIR)  # the sum of finite values may be infinite

    def buffers(self) -> Iterator[NDArray[Any]]:
        yield from super().buffers()
        yield from (self.outgoing, self.incoming)
