"""torch's reduce operations as ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from asyncpar.collectives.arrays import Array
from asyncpar.errors import UsageError
from asyncpar.torch.arrays import array_of

_Kind = dist.ReduceOp.RedOpType


@dataclass(frozen=True, slots=True)
class Reduction:
    """How tensors are combined: inputs times ``factor``, by the communicator's ``op``, divided by the group's size.

    ``factor`` is None for none.  Only the mean of integers is divided here (``divides``), as the communicator knows
    none of them.
    """

    op: str
    factor: Any = None
    divides: bool = False

    @property
    def is_plain(self) -> bool:
        """Is it all done by the communicator?"""
        return self.factor is None and not self.divides

    def scaled(self, array: Array) -> Array:
        """Return the inputs times the factor: ``array`` itself if there is none."""
        if self.factor is None:
            return array
        return (array * self._factor(array)).astype(array.dtype, copy=False)

    def scale(self, array: Array) -> None:
        """Multiply the inputs by the factor, in place."""
        if self.factor is not None:
            array *= self._factor(array)

    def divide(self, array: Array, size: int) -> Array:
        """Make of the sum over ``size`` ranks what is asked for, in place.

        Quotients of integers lose what is behind the point, as NCCL's do: -7 / 2 is -3.
        """
        if self.divides:
            if size > np.iinfo(array.dtype).max:
                array[...] = 0
            else:
                is_rounded_down = (array < 0) & (array % size != 0)
                array //= size
                array += is_rounded_down
        return array

    def _factor(self, array: Array) -> Any:
        if array.dtype.kind in "biu":
            raise UsageError(f"op: PREMUL_SUM needs a floating dtype, as {array.dtype} cannot hold the products")
        factor = self.factor
        return (array_of(factor, "op") if isinstance(factor, torch.Tensor) else np.asarray(factor)).astype(array.dtype)


_PLAIN = {
    int(kind): Reduction(name)
    for kind, name in (
        (dist.ReduceOp.SUM, "sum"),
        (dist.ReduceOp.AVG, "mean"),
        (dist.ReduceOp.PRODUCT, "prod"),
        (dist.ReduceOp.MIN, "min"),
        (dist.ReduceOp.MAX, "max"),
        (dist.ReduceOp.BAND, "band"),
        (dist.ReduceOp.BOR, "bor"),
        (dist.ReduceOp.BXOR, "bxor"),
    )
}
"""By number: torch's enumeration is slow to hash and to compare."""

_MEAN = _PLAIN[int(dist.ReduceOp.AVG)]
_INTEGER_MEAN = Reduction("sum", divides=True)


def reduction_of(options: Any, dtype: torch.dtype) -> Reduction:
    """Return how ``options`` ask that tensors of ``dtype`` be combined.

    Integers are averaged as NCCL does it: the sum, which wraps around in their dtype, is divided, towards zero.
    """
    operation = options.reduceOp
    kind = getattr(operation, "op", operation)
    if isinstance(kind, _Kind):
        found = _PLAIN.get(kind.value)
        if found is not None:
            if found is _MEAN and not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool):
                return _INTEGER_MEAN
            return found
    if kind == dist.ReduceOp.PREMUL_SUM:
        return Reduction("sum", operation.__getstate__()[1])
    raise UsageError(f"op: expected a torch.distributed.ReduceOp, got {operation!r}")
