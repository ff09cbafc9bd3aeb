"""The memory of one bucket, allocated once and used in every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.codecs import Bytes, Codec, Values
from asyncpar.errors import ArenaFull, UsageError
from asyncpar.gradsync.plan import Bucket

Empty = Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]]
"""Returns a new array of undefined content, such as ``Communicator.empty``."""

STATUS_BYTES = 4
"""Each encoded shard travels behind a status word, so that a rank that cannot encode tells the others so."""


class BucketBuffers:
    """``flat`` holds the bucket's gradients, and after the reduction their sum or mean.

    With a codec that is not summable, ``flat`` is float32, padded to ``size`` shards of equal length, of which rank
    ``r`` owns shard ``r``; ``outgoing`` and ``incoming`` hold one encoded row per rank.  ``residual`` is what earlier
    steps failed to send, ``residual_square`` the square of its norm; ``lost`` becomes the next residual when the step
    succeeds.  What other ranks read comes from ``empty``, so that collectives need not copy it.
    """

    def __init__(self, bucket: Bucket, *, size: int, codec: Codec, has_feedback: bool, empty: Empty = np.empty) -> None:
        self.bucket = bucket
        self.codec = codec
        self.size = size
        self.residual_square = 0.0
        self._lost_square = 0.0
        if codec.is_summable:
            self.flat: NDArray[np.floating[Any]] = _zeros((bucket.count,), bucket.dtype, empty)
            return
        self.shard_count = -(-bucket.count // size)
        padded = self.shard_count * size
        self.row_bytes = -(-(STATUS_BYTES + codec.encoded_bytes(self.shard_count)) // 4) * 4
        self.flat = np.zeros(padded, np.float32)
        self.outgoing: Bytes = _zeros((size, self.row_bytes), np.dtype(np.uint8), empty)
        self.incoming: Bytes = np.zeros((size, self.row_bytes), np.uint8)
        self.reduced: Bytes = _zeros((self.row_bytes,), np.dtype(np.uint8), empty)
        self.total: Values = np.zeros(self.shard_count, np.float32)
        self.scratch: Values = np.zeros(self.shard_count, np.float32)
        self.residual: Values | None = np.zeros(padded, np.float32) if has_feedback else None
        self.lost: Values | None = np.zeros(padded, np.float32) if has_feedback else None

    @property
    def payload(self) -> NDArray[np.floating[Any]]:
        """The values of ``flat`` that belong to gradients, without the padding."""
        return self.flat[: self.bucket.count]

    def shard(self, array: Values, rank: int) -> Values:
        """Return the part of a padded array that ``rank`` owns."""
        return array[rank * self.shard_count : (rank + 1) * self.shard_count]

    def body(self, row: Bytes) -> Bytes:
        """Return the encoded values of a row."""
        return row[STATUS_BYTES : STATUS_BYTES + self.codec.encoded_bytes(self.shard_count)]

    def keep_lost(self) -> None:
        """Make what this step lost the residual of the next."""
        if not self.codec.is_summable:
            self.residual, self.lost = self.lost, self.residual
            self.residual_square = self._lost_square

    def residuals(self) -> Iterator[tuple[str, Values]]:
        """Yield a view of each parameter's residual, flat, by name."""
        if not self.codec.is_summable and self.residual is not None:
            for slot in self.bucket.slots:
                yield slot.name, self.residual[slot.start : slot.stop]

    def measure_lost(self) -> None:
        """Take the norm of what this step lost, which is complete."""
        if not self.codec.is_summable and self.lost is not None:
            self._lost_square = float(np.vdot(self.lost, self.lost))


def _zeros(shape: tuple[int, ...], dtype: np.dtype[Any], empty: Empty) -> NDArray[Any]:
    """Return zeros from ``empty``, or of ordinary memory where it has none to give."""
    try:
        array = empty(shape, dtype)
    except (ArenaFull, UsageError):
        return np.zeros(shape, dtype)
    array.fill(0)
    return array
