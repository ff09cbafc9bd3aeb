"""Base of schemes with a codec: status words of encoded vectors, and error feedback for the next step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.codecs import Bytes, Codec, Values
from asyncpar.errors import ProtocolError
from asyncpar.gradsync.plan import Bucket
from asyncpar.gradsync.schemes.scheme import Memory, Scheme

STATUS_BYTES = 4
FINE = 0
NON_FINITE = 1


def body_of(codec: Codec, count: int) -> slice:
    """Return where in a row ``count`` encoded values lie."""
    return slice(STATUS_BYTES, STATUS_BYTES + codec.encoded_bytes(count))


def row_bytes(body: slice) -> int:
    """Return the length of a row, a multiple of four."""
    return -(-int(body.stop) // 4) * 4


def set_status(rows: Bytes, status: int) -> None:
    """Write the status of one row or of several."""
    rows[..., :STATUS_BYTES] = 0
    rows[..., 0] = status


def are_fine(rows: Bytes) -> bool:
    """Are the rows of all ranks finite?"""
    return not rows[:, 0].any()


@contextmanager
def decoding(rank: int, bucket: Bucket) -> Iterator[None]:
    """Say whose row it is that cannot be decoded."""
    try:
        yield
    except ProtocolError as error:
        raise ProtocolError(f"{bucket}: what rank {rank} sent cannot be decoded: {error}") from error


class Feedback:
    """``residual`` is what earlier steps failed to send; ``lost`` becomes the next residual when the step succeeds.

    Both are float32 vectors of ``count`` values, those of the bucket first; None where nothing is kept.
    """

    def __init__(self, bucket: Bucket, *, count: int, is_kept: bool) -> None:
        self._bucket = bucket
        self.residual: Values | None = np.zeros(count, np.float32) if is_kept else None
        self.lost: Values | None = np.zeros(count, np.float32) if is_kept else None

    def commit(self) -> None:
        """Make what this step lost the residual of the next."""
        self.residual, self.lost = self.lost, self.residual
        if self.residual is not None:
            self.residual[self._bucket.count :] = 0.0  # padding belongs to no parameter

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(array.nbytes for array in (self.residual, self.lost) if array is not None)

    def by_name(self) -> Iterator[tuple[str, Values]]:
        """Yield a view of each parameter's residual, flat, by name."""
        if self.residual is not None:
            for slot in self._bucket.slots:
                yield slot.name, self.residual[slot.start : slot.stop]


def part(array: Values | None, place: slice) -> Values | None:
    """Return ``array[place]``; None of None."""
    return None if array is None else array[place]


class Lossy(Scheme):
    """``flat`` and ``result`` are float32 vectors of ``count`` values; error feedback is kept where it is asked for."""

    def __init__(self, bucket: Bucket, *, size: int, count: int, has_feedback: bool, memory: Memory) -> None:
        super().__init__(bucket, size=size, keeps_input=memory.keeps_input)
        self.flat = np.zeros(count, np.float32)
        self.result = np.zeros(count, np.float32) if memory.keeps_input else self.flat
        self.feedback = Feedback(bucket, count=count, is_kept=has_feedback)
        self._is_lent = False

    def lend(self, values: NDArray[Any]) -> bool:
        is_fit = values.dtype == np.float32 and values.shape == self.flat.shape and values.flags.c_contiguous
        if is_fit and not self.keeps_input:
            self.flat = self.result = values
            self._is_lent = True
        elif self._is_lent:
            self.flat = self.result = np.zeros(self.flat.shape, np.float32)
            self._is_lent = False
        return self._is_lent

    def commit(self) -> None:
        self.feedback.commit()

    def buffers(self) -> Iterator[NDArray[Any]]:
        if not self._is_lent:
            yield from super().buffers()

    @property
    def residual_nbytes(self) -> int:
        return self.feedback.nbytes

    def residuals(self) -> Iterator[tuple[str, Values]]:
        return self.feedback.by_name()
