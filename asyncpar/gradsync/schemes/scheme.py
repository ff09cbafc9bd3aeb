"""The interface of schemes, and the schemes of codecs whose encoded form cannot be summed.

A scheme owns the memory of one bucket and reduces it in reduction steps: each is some local work followed by one
collective.  ``settle`` follows the last.  Work runs in threads, collectives on the loop; the caller waits for the one
before it begins the other.

``ShardedReduce``: owners decode, add and encode: see ``codecs.rows``.  The error of the first encoding goes into the
residual of the rank that encoded, and that of the second into the residual of the owner, which adds it to the same sum
in the next step.  So one residual per parameter and rank is all the state, whichever bucket or shard a parameter is in.

``Pair``: between two ranks each sends the other its whole vector.  Both decode both rows and add them in the order of
ranks, so both hold the same bits.  The traffic is the same as between two owners, but in one exchange instead of two
dependent ones, and encoded once: the sum itself loses nothing, and half an encoding is saved.  Among more than two
ranks owners send less.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncpar.agreement.exchanges import OwedCollective
from asyncpar.codecs import Bytes, Codec, Identity, Values
from asyncpar.codecs.rows import RowFormat, ShardedSum, are_finite
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import ArenaFull, UsageError
from asyncpar.gradsync.groups import Name
from asyncpar.gradsync.plan import Bucket

Empty: TypeAlias = Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]]
"""Returns a new array of undefined content, such as ``Communicator.empty``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeMemory:
    """``empty`` allocates memory that other ranks read, so that collectives need not copy it.

    With ``keeps_input`` the result of a bucket is stored separately from its input.
    """

    empty: Empty = np.empty
    keeps_input: bool = False

    def shared(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Return zeros that other ranks can read, or in ordinary memory if there is no room for them."""
        try:
            array = self.empty(shape, np.dtype(dtype))
        except (ArenaFull, UsageError):
            return np.zeros(shape, dtype)
        array.fill(0)
        return array


_PIECE = 1 << 16
"""Number of values that stay in the cache between two passes."""

Place: TypeAlias = tuple[int, ...]
"""Numbers of a step and a bucket, equal on all ranks, from which codecs draw."""


class ReductionStep(OwedCollective[Any]):
    """A collective, preceded by ``work`` that needs no other rank, if any."""

    __slots__ = ("work",)

    def __init__(self, work: Callable[[], None] | None, begin: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        super().__init__(begin)
        self.work = work


class Scheme(ABC):
    """Reduces one bucket over replicas, once per step.

    ``flat`` takes the bucket's gradients before the first reduction step.  After ``settle``, ``result``, which may be
    ``flat``, holds their sum or mean: the mean over ``contributors`` ranks is ``result * factor(contributors)``.  Both
    begin with the values of the bucket, followed by padding.  With ``keeps_input`` only ``pack`` writes to ``flat``,
    and ``result`` is another array (unless there is only one rank).

    ``divisor`` is the power of two by which that sum or mean was divided so that it does not overflow.  ``gain`` is the
    factor that compensates for values that are left out and not sent later: see ``Codec.gain``.

    Values that are not finite on some rank make ``is_finite`` false after ``settle`` on all of them; nothing raises.
    """

    is_finite = True
    divisor = 1
    gain = 1.0
    codec_name = Identity.name
    """The name of the codec that encodes the bucket, recorded in its events."""

    def __init__(self, bucket: Bucket, *, size: int, keeps_input: bool = False) -> None:
        self.bucket = bucket
        self.size = size
        self.keeps_input = keeps_input
        self.flat: NDArray[Any] = np.zeros(0)
        self.result: NDArray[Any] = self.flat

    @property
    def payload(self) -> NDArray[np.floating[Any]]:
        """The values of ``flat`` that belong to gradients, without the padding."""
        return self.flat[: self.bucket.count]

    @property
    def reduced(self) -> NDArray[np.floating[Any]]:
        """The values of ``result`` that belong to gradients."""
        return self.result[: self.bucket.count]

    def factor(self, contributors: int) -> float:
        """Return the factor that makes ``result`` the mean over ``contributors`` ranks, where the others gave zeros."""
        return (self.size if self.is_mean else 1) * self.divisor / contributors * self.gain

    @property
    @abstractmethod
    def is_mean(self) -> bool:
        """Whether ``result`` is the mean over all ranks rather than the sum."""

    @abstractmethod
    def reduction_steps(self, key: Name, place: Place) -> Sequence[ReductionStep]:
        """Return the reductions of a training step in order; the names of their collectives begin with ``key``."""

    def report_parts(self, report: Callable[[int, int], None] | None) -> bool:  # noqa: ARG002
        """Report ranges of ``result`` that are final before ``settle`` to ``report`` in the next step; return whether.

        Called on the loop.  A scheme that does so reports each element once, and ``settle`` changes none of them.
        """
        return False

    @abstractmethod
    def settle(self) -> None:
        """Compute ``result`` from the data of the last collective.

        Raises ``ProtocolError`` if the received data cannot be decoded.
        """

    def lend(self, values: NDArray[Any]) -> bool:  # noqa: ARG002
        """Use ``values`` as ``flat`` and ``result`` until the next ``lend``, if possible; return whether it is.

        It is if their dtype, shape and layout are those of ``flat``; otherwise ``flat`` is memory of the scheme.
        """
        return False

    def commit(self) -> None:  # noqa: B027
        """End a successful step: keep its compression error and other state for the next one."""

    def close(self) -> None:  # noqa: B027
        """Free memory on devices, if any; idempotent."""

    def swap(self) -> None:
        """Exchange ``result`` and ``flat`` for the next step."""
        self.flat, self.result = self.result, self.flat

    def buffers(self) -> Iterator[NDArray[Any]]:
        """Yield the arrays that the scheme keeps between steps, except residuals; one may be yielded twice."""
        yield self.flat
        yield self.result

    @property
    def nbytes(self) -> int:
        """Bytes of ``buffers``, each array counted once."""
        return sum(array.nbytes for array in {id(array): array for array in self.buffers()}.values())

    @property
    def residual_nbytes(self) -> int:
        """Bytes used by error feedback."""
        return 0

    @property
    def residual_gain(self) -> float:
        """The factor from the amount lacking from the mean to each rank's residual, if any; 1 if all replicas have
        one.
        """
        return 1.0

    def residuals(self) -> Iterator[tuple[str, Values]]:
        """Yield a view of each parameter's residual, flat, by name."""
        yield from ()

    def restore_residuals(self, residuals: Mapping[str, Values]) -> None:
        """Take over residuals of an earlier scheme, by name, as far as they fit."""
        for name, residual in self.residuals():
            if name in residuals and residuals[name].size == residual.size:
                residual[:] = residuals[name]

    def state(self) -> Iterator[tuple[str, Values]]:
        """Yield a copy of the codec's state of each parameter, flat, by name."""
        yield from ()

    def restore(self, state: Mapping[str, Values]) -> None:  # noqa: B027
        """Restore what ``state`` of an earlier scheme yielded, as far as it fits."""


def all_finite(values: NDArray[np.floating[Any]]) -> bool:
    """Return whether all ``values`` are finite; several times as fast as testing each."""
    return all(_is_finite(values[start : start + _PIECE]) for start in range(0, values.size, _PIECE))


def scale(values: NDArray[np.floating[Any]], factor: float) -> bool:
    """Multiply ``values`` in place and return whether all of them are finite, at little extra cost."""
    scalar, is_finite = values.dtype.type(factor), True
    for start in range(0, values.size, _PIECE):
        piece = values[start : start + _PIECE]
        piece *= scalar
        is_finite &= _is_finite(piece)
    return is_finite


def _is_finite(piece: NDArray[np.floating[Any]]) -> bool:
    return bool(np.isfinite(piece.min()) and np.isfinite(piece.max()))


class Feedback:
    """``residual`` is what earlier steps failed to send; ``lost`` becomes the next residual if the step succeeds.

    Both are float32 vectors of ``count`` values, those of the bucket first; None if nothing is kept.
    """

    def __init__(self, bucket: Bucket, *, count: int, is_kept: bool) -> None:
        self._bucket = bucket
        self.residual: Values | None = np.zeros(count, np.float32) if is_kept else None
        self.lost: Values | None = np.zeros(count, np.float32) if is_kept else None

    def commit(self) -> None:
        """Make the loss of this step the residual of the next."""
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


class Lossy(Scheme):
    """Float32 vectors ``flat`` and ``result`` of ``count`` values, with error feedback if requested."""

    def __init__(self, bucket: Bucket, *, size: int, count: int, has_feedback: bool, memory: SchemeMemory) -> None:
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


class ShardedReduce(Lossy):
    """The sum of decoded shards, by their owners.

    ``outgoing`` and ``incoming`` hold one encoded row per rank, ``owned`` the row of this rank's sum.
    """

    is_mean = False

    def __init__(
        self, bucket: Bucket, communicator: Communicator, codec: Codec, *, has_feedback: bool, memory: SchemeMemory
    ) -> None:
        self._sum = total = ShardedSum(
            codec,
            bucket.count,
            rank=communicator.rank,
            size=communicator.size,
            keeps_lost=has_feedback,
            shared=memory.shared,
        )
        count = total.padded_count
        super().__init__(bucket, size=communicator.size, count=count, has_feedback=has_feedback, memory=memory)
        self.gain = 1.0 if has_feedback else total.gain
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
        self.gain = 1.0 if has_feedback else codec.gain(bucket.count)
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
