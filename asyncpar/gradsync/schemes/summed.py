"""Schemes of one all-reduce: without a codec, or with one whose encoded form can be summed.

A float16 cannot hold every sum of float16 gradients, so each rank's part is divided by a power of two before it is
encoded, and the sum multiplied by it when it is decoded.  So the loss of small values is known, and part of the
residual.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.codecs import Bytes, Codec, Values
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.names import AllReduceAlgorithm
from asyncpar.errors import NonFiniteValue, ProtocolError
from asyncpar.gradsync.groups import Name
from asyncpar.gradsync.plan import Bucket
from asyncpar.gradsync.schemes.scheme import Lossy, Place, ReductionStep, Scheme, SchemeMemory, all_finite


class Exact(Scheme):
    """The mean, by an all-reduce with ``algorithm``, which may be changed between steps."""

    is_mean = True

    def __init__(
        self, bucket: Bucket, communicator: Communicator, *, algorithm: AllReduceAlgorithm | None, memory: SchemeMemory
    ) -> None:
        super().__init__(bucket, size=communicator.size, keeps_input=memory.keeps_input)
        self._communicator = communicator
        self.algorithm = algorithm
        self._report: Callable[[int, int], None] | None = None
        self.flat = memory.shared((bucket.count,), bucket.dtype)
        self.result = memory.shared((bucket.count,), bucket.dtype) if memory.keeps_input else self.flat

    def reduction_steps(self, key: Name, place: Place) -> Sequence[ReductionStep]:  # noqa: ARG002
        return [ReductionStep(None, lambda: self._reduce(key))]

    def report_parts(self, report: Callable[[int, int], None] | None) -> bool:
        self._report = report
        return True

    def settle(self) -> None:
        self.is_finite = all_finite(self.result)

    def _reduce(self, key: Name) -> Coroutine[Any, Any, object]:
        out, report = None if self.result is self.flat else self.result, self._report
        all_reduce = self._communicator.all_reduce
        if report is None:
            return all_reduce(self.flat, op="mean", out=out, algorithm=self.algorithm, key=str(key))
        parts = all_reduce.parts(self.flat, op="mean", out=out, algorithm=self.algorithm, key=str(key))
        return parts.each(lambda part: report(part.where.start, part.where.stop))


class Alone(Scheme):
    """A single replica."""

    is_mean = True

    def __init__(self, bucket: Bucket, *, keeps_input: bool = False) -> None:
        super().__init__(bucket, size=1, keeps_input=keeps_input)
        self.flat = self.result = np.zeros(bucket.count, bucket.dtype)

    def reduction_steps(self, key: Name, place: Place) -> Sequence[ReductionStep]:  # noqa: ARG002
        return []

    def settle(self) -> None:
        self.is_finite = all_finite(self.result)


def headroom(dtype: np.dtype[Any] | None, parts: int) -> int:
    """Return the power of two by which ``parts`` values of ``dtype`` are divided so that their sum does not overflow.

    1 for all dtypes but float16, whose largest value sums of gradients may well reach.
    """
    return 1 << (parts - 1).bit_length() if dtype == np.float16 else 1


class Summed(Lossy):
    """The sum of encoded forms, in the codec's ``sum_dtype``, divided by ``divisor``, a power of two.

    The residual is of undivided gradients.
    """

    is_mean = False

    def __init__(
        self,
        bucket: Bucket,
        communicator: Communicator,
        codec: Codec,
        *,
        algorithm: AllReduceAlgorithm | None,
        has_feedback: bool,
        memory: SchemeMemory,
        divisor: int,
    ) -> None:
        count = bucket.count
        super().__init__(bucket, size=communicator.size, count=count, has_feedback=has_feedback, memory=memory)
        self._communicator = communicator
        self._algorithm = algorithm
        self._codec = self._drawn = codec
        self.gain = 1.0 if has_feedback else codec.gain(count)
        assert codec.sum_dtype is not None, "the codec is summable"
        self._sum_dtype = codec.sum_dtype
        self.divisor = divisor
        self._encoded: Bytes = memory.shared((codec.encoded_bytes(count),), np.uint8)

    def reduction_steps(self, key: Name, place: Place) -> Sequence[ReductionStep]:
        self._drawn = self._codec.at(*place)
        encoded = self._encoded.view(self._sum_dtype)
        reduce = self._communicator.all_reduce
        return [ReductionStep(self._encode, lambda: reduce(encoded, algorithm=self._algorithm, key=str(key)))]

    def settle(self) -> None:
        try:
            self._drawn.decode(self._encoded, self.result)
        except ProtocolError:  # its length is right, so NaN or infinity is the only reason to refuse a sum
            self.is_finite = False
        else:
            self.is_finite = True

    def buffers(self) -> Iterator[NDArray[Any]]:
        yield from super().buffers()
        yield self._encoded

    def _encode(self) -> None:
        residual, lost, values = self.feedback.residual, self.feedback.lost, self.flat
        if self.divisor > 1:
            values, residual = self._divided(residual), None
        try:
            self._drawn.encode(values, self._encoded, residual=residual, lost=lost)
        except NonFiniteValue:
            self._encoded.view(self._sum_dtype).fill(np.nan)
        else:
            if self.divisor > 1 and lost is not None:
                lost *= np.float32(self.divisor)

    def _divided(self, residual: Values | None) -> Values:
        """Return the divided values to send; ``result`` has room for them."""
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            if residual is not None:
                np.add(self.flat, residual, out=self.result)
            elif self.result is not self.flat:
                self.result[:] = self.flat
            self.result *= np.float32(1.0 / self.divisor)
        return self.result
