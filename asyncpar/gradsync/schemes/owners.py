"""Codecs whose encoded form cannot be summed are reduced by owners.

The bucket is cut into a shard for each rank.  Each rank encodes every shard for its owner; the owner decodes and adds
them in float32 in the order of ranks, and encodes the sum; everyone, the owner too, takes the decoded sum, so all ranks
hold the same bits.  What the first encoding loses goes into the residual of the rank that lost it, and what the second
loses into the residual of the owner, who adds it to the same sum in the next step.  So one residual per parameter and
rank is all the state there is, whichever bucket or shard a parameter is in.

Between two ranks there is a better way, see ``pair.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.codecs import Bytes, Codec, Values
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
    part,
    row_bytes,
    set_status,
)
from asyncpar.gradsync.schemes.scheme import Memory, Place, ReductionStep


class ShardedReduce(Lossy):
    """The sum of decoded shards, by their owners.

    ``outgoing`` and ``incoming`` hold one encoded row per rank, ``owned`` the row of this rank's sum.
    """

    is_mean = False

    def __init__(
        self, bucket: Bucket, communicator: Communicator, codec: Codec, *, has_feedback: bool, memory: Memory
    ) -> None:
        size, self._rank = communicator.size, communicator.rank
        self._shard = -(-bucket.count // size)
        count = self._shard * size
        super().__init__(bucket, size=size, count=count, has_feedback=has_feedback, memory=memory)
        self._communicator = communicator
        self._codec = self._drawn = codec
        self._body = body_of(codec, self._shard)
        width = row_bytes(self._body)
        self.outgoing: Bytes = memory.shared((size, width), np.uint8)
        self.incoming: Bytes = np.zeros((size, width), np.uint8)
        self.owned: Bytes = memory.shared((width,), np.uint8)
        self._total: Values = np.zeros(self._shard, np.float32)
        self._lost_of_total: Values | None = np.zeros(self._shard, np.float32) if has_feedback else None

    def reduction_steps(self, key: Name, place: Place) -> Sequence[ReductionStep]:
        self._drawn = self._codec.at(*place)
        exchange, gather = self._communicator.all_to_all, self._communicator.all_gather
        return [
            ReductionStep(self.encode, lambda: exchange(self.outgoing, out=self.incoming, key=f"{key}/shards")),
            ReductionStep(self.sum_owned, lambda: gather(self.owned, out=self.incoming, key=f"{key}/sums")),
        ]

    def encode(self) -> None:
        """Fill the outgoing rows.  Values that are not finite make rows that say so, for every rank alike."""
        self.flat[self.bucket.count :] = 0.0  # which decoding may have written to
        try:
            for rank in range(self.size):
                self._drawn.encode(
                    self.flat[self._of(rank)],
                    self.outgoing[rank, self._body],
                    residual=part(self.feedback.residual, self._of(rank)),
                    lost=part(self.feedback.lost, self._of(rank)),
                )
        except NonFiniteValue:
            set_status(self.outgoing, NON_FINITE)
        else:
            set_status(self.outgoing, FINE)

    def sum_owned(self) -> None:
        """Add the incoming rows in the order of ranks and encode the sum, or say that it is not finite."""
        self.is_finite = are_fine(self.incoming)
        if not self.is_finite:
            set_status(self.owned, NON_FINITE)
            return
        for rank in range(self.size):
            self._decode(rank, self._total, adds=rank > 0)
        try:
            self._drawn.encode(self._total, self.owned[self._body], lost=self._lost_of_total)
        except NonFiniteValue:  # the sum of finite values overflowed
            set_status(self.owned, NON_FINITE)
            return
        set_status(self.owned, FINE)
        if self.feedback.lost is not None and self._lost_of_total is not None:
            own = self.feedback.lost[self._of(self._rank)]
            own += self._lost_of_total

    def settle(self) -> None:
        """Decode the sums of all owners; nothing is lost after that."""
        self.is_finite = are_fine(self.incoming)
        if not self.is_finite:
            return
        for rank in range(self.size):
            self._decode(rank, self.result[self._of(rank)], adds=False)

    def buffers(self) -> Iterator[NDArray[Any]]:
        yield from super().buffers()
        yield from (self.outgoing, self.incoming, self.owned, self._total)
        if self._lost_of_total is not None:
            yield self._lost_of_total

    def _of(self, rank: int) -> slice:
        """Return the shard that ``rank`` owns."""
        return slice(rank * self._shard, (rank + 1) * self._shard)

    def _decode(self, rank: int, out: Values, *, adds: bool) -> None:
        decode = self._drawn.decode_add if adds else self._drawn.decode
        with decoding(rank, self.bucket):
            decode(self.incoming[rank, self._body], out)
