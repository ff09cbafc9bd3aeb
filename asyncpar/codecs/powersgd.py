"""PowerSGD: the mean of matrices over ranks at low rank, in two rounds of small sums (Vogels et al. 2019).

An array of two or more dimensions is treated as a matrix ``M`` of ``shape[0]`` rows.  With ``Q``, orthonormal and equal
on all ranks, each rank sends ``M Q``; the orthonormalized mean is ``P``.  Each sends ``transpose(M) P``, and with the
mean ``R`` of that the result is ``P transpose(R)``: the mean matrix, projected upon ``P``.  The orthonormalized ``R``
is the next step's ``Q``, so the steps together are a power iteration.  A rank's loss is its own matrix minus the same
projection of it: ranks may differ forever in the projected part without growing residuals.

First message: for each array in order ``M Q`` row by row (rows x rank), or the array itself if it is a vector or too
small to gain.  Second: for each compressed matrix ``transpose(R)`` row by row (rank x columns).  Without any such
matrix there is only one message.

Means must be the same bits on all ranks, and so must numpy's version; processors may differ, see ``low_rank.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod

import numpy as np

from asyncpar.codecs.codec import RoundCodec, RoundEncoder, Values, check_vector
from asyncpar.codecs.corrected import Corrected
from asyncpar.codecs.draw import check_seed, draw_uniform, make_key
from asyncpar.codecs.low_rank import expand, orthonormalize, subtract_product
from asyncpar.errors import NonFiniteValue, UsageError


class PowerSgd(RoundCodec):
    """Sends matrices at ``rank`` and other arrays unchanged.  Meant for error feedback: single steps are biased.

    ``seed`` determines the initial guess of each factor.
    """

    def __init__(self, rank: int, seed: int = 0) -> None:
        if type(rank) is not int or rank < 1:
            raise UsageError(f"rank: expected an integer of 1 or more, got {rank!r}")
        self.rank = rank
        self.seed = check_seed(seed)
        self.name = f"powersgd:{rank}" + (f":{seed}" if seed else "")

    def encoder(self, shapes: Sequence[tuple[int, ...]]) -> RoundEncoder:
        return PowerSgdEncoder(shapes, rank=self.rank, seed=self.seed)


class PowerSgdEncoder(RoundEncoder):
    """The state of ``PowerSgd`` for arrays of some shapes: messages, ``Q`` of each matrix, and a copy of the values.

    The copy is made only in steps with a residual.  ``advance`` raises ``NonFiniteValue``, on all ranks alike, for
    means that are not finite.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], *, rank: int, seed: int) -> None:
        ends = [0, *accumulate(map(prod, shapes))]
        self.size = ends[-1]
        self._parts = [slice(*edge) for edge in pairwise(ends)]
        self._matrices = [_Matrix(shape, rank, make_key(seed, index)) for index, shape in enumerate(shapes)]
        first = [0, *accumulate(matrix.first_size for matrix in self._matrices)]
        second = [0, *accumulate(matrix.second_size for matrix in self._matrices)]
        self.messages: tuple[Values, ...] = (np.zeros(first[-1], np.float32),)
        if second[-1]:
            self.messages += (np.zeros(second[-1], np.float32),)
        for matrix, one, other in zip(self._matrices, pairwise(first), pairwise(second), strict=True):
            matrix.lay_out(self.messages[0][slice(*one)], self.messages[-1][slice(*other)])
        self._values: Values | None = None
        self._copy: Values | None = None
        self._is_finished = False

    def reserve_residual(self) -> None:
        if self._copy is None:
            self._copy = np.empty(self.size, np.float32)

    def start(self, values: Values, *, residual: Values | None = None) -> None:
        check_vector("values", values, np.float32, self.size)
        if residual is not None:
            check_vector("residual", residual, np.float32, self.size)
            self.reserve_residual()
        self._is_finished = False
        for x in Corrected(values, residual, None if residual is None else self._copy).pieces():
            _check_finite(x, "values")
        self._values = values if residual is None else self._copy
        for matrix, x in self._pairs():
            matrix.project(x)
        _check_finite(self.messages[0], "values times their basis")

    def advance(self, index: int) -> None:
        _check_finite(self.messages[index], f"mean of message {index}")
        if index == 0:
            for matrix, x in self._pairs():
                matrix.project_back(x)
            _check_finite(self.messages[-1], "values times the basis of their mean")

    def finish(self, out: Values, *, lost: Values | None = None) -> None:
        check_vector("out", out, np.float32, self.size)
        if lost is not None:
            check_vector("lost", lost, np.float32, self.size)
        for matrix, x, part in zip(self._matrices, self._inputs(), self._parts, strict=True):
            matrix.expand(x, out[part], None if lost is None else lost[part])
        self._values, self._is_finished = None, True

    def commit(self) -> None:
        if self._is_finished:
            for matrix in self._matrices:
                matrix.turn()
        self._is_finished = False

    @property
    def nbytes(self) -> int:
        copy = 0 if self._copy is None else self._copy.nbytes
        return super().nbytes + copy + sum(matrix.nbytes for matrix in self._matrices)

    def state(self) -> list[Values | None]:
        return [matrix.basis.flatten() if matrix.is_compressed else None for matrix in self._matrices]

    def restore(self, state: Sequence[Values | None]) -> None:
        if len(state) != len(self._matrices):
            raise UsageError(f"state: expected {len(self._matrices)} arrays or None, got {len(state)}")
        for index, basis in enumerate(state):
            if basis is not None and not np.isfinite(basis).all():
                raise UsageError(f"state: expected finite numbers, got others for array {index}")
        for matrix, basis in zip(self._matrices, state, strict=True):
            matrix.restore(basis)

    def _inputs(self) -> list[Values]:
        if self._values is None:
            raise UsageError("start: expected to be called before advance and finish of each step, got no call")
        return [self._values[part] for part in self._parts]

    def _pairs(self) -> list[tuple[_Matrix, Values]]:
        return list(zip(self._matrices, self._inputs(), strict=True))


class _Matrix:
    """One array: a compressed matrix, or another array, which is sent unchanged."""

    def __init__(self, shape: tuple[int, ...], rank: int, key: int) -> None:
        height, width = shape[0] if len(shape) > 1 else 0, prod(shape[1:])
        self._shape = (height, width)
        self._rank = min(rank, height, width)
        self._key = key
        self.is_compressed = len(shape) > 1 and self._rank * (height + width) < height * width
        self.first_size = self._rank * height if self.is_compressed else prod(shape)
        self.second_size = self._rank * width if self.is_compressed else 0
        self._left = self._own = np.zeros((0, 0), np.float32)
        self.restore(None)

    def lay_out(self, first: Values, second: Values) -> None:
        """Set the parts of the messages that belong to this array."""
        self._first, self._second = first, second
        if self.is_compressed:
            self._first = first.reshape(self._shape[0], self._rank)
            self._second = second.reshape(self._rank, self._shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of the bases of this step and the next, excluding messages."""
        return sum(array.nbytes for array in (self.basis, self._left, self._own))

    def project(self, x: Values) -> None:
        """Fill the first message."""
        if self.is_compressed:
            with np.errstate(over="ignore", invalid="ignore"):
                np.matmul(x.reshape(self._shape), self.basis.T, out=self._first)
        else:
            self._first[:] = x

    def project_back(self, x: Values) -> None:
        """Take the mean of the first message and fill the second."""
        if self.is_compressed:
            self._left = orthonormalize(np.ascontiguousarray(self._first.T))
            with np.errstate(over="ignore", invalid="ignore"):
                np.matmul(self._left, x.reshape(self._shape), out=self._second)
            self._own = self._second.copy()

    def expand(self, x: Values, out: Values, lost: Values | None) -> None:
        """Read the mean of the last message; write the result, and the error of this rank's messages."""
        if not self.is_compressed:
            out[:] = self._first
            if lost is not None:
                lost.fill(0.0)
            return
        if lost is not None:
            subtract_product(self._left, self._own, x.reshape(self._shape), out=lost.reshape(self._shape))
        expand(self._left, self._second, out.reshape(self._shape))

    def turn(self) -> None:
        """Begin the next step with the directions found by this one; redraw those that are zero."""
        if self.is_compressed:
            self.basis = orthonormalize(self._second, spare=self._draw())

    def restore(self, basis: Values | None) -> None:
        """Restore ``basis``, or the initial one if it does not fit."""
        if not self.is_compressed:
            self.basis = np.zeros((0, 0), np.float32)
        elif basis is None or basis.size != self.second_size:
            self.basis = orthonormalize(self._draw())
        else:
            self.basis = np.array(basis, np.float32).reshape(self._rank, self._shape[1])

    def _draw(self) -> Values:
        return draw_uniform(self.second_size, self._key).reshape(self._rank, self._shape[1])


def _check_finite(values: Values, what: str) -> None:
    if not np.isfinite(values).all():
        raise NonFiniteValue(f"{what}: expected finite numbers, got NaN or infinity")
