"""Settings of a run: frozen, validated, the same for the command line and for every rank.  Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from asyncpar.collectives.algorithms.catalog import check_algorithm
from asyncpar.core.config.names import ReduceOp
from asyncpar.errors import UsageError

OPERATIONS = (
    "all_reduce",
    "all_reduce_many",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
)
EVERY = "all"
"""Stands for all operations on the command line."""

REDUCING = ("all_reduce", "all_reduce_many", "reduce", "reduce_scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
WHOLE = ("all_reduce", "all_reduce_many", "broadcast", "reduce")
"""Operations in which every rank holds the whole buffer; in the others a rank holds a share, or a share for each."""

MANY_BYTES = 4096
"""Size of the arrays into which all_reduce_many divides the buffer."""

DTYPES: dict[str, DTypeLike] = {
    "float32": np.float32,
    "float64": np.float64,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "int8": np.int8,
    "uint8": np.uint8,
    "int32": np.int32,
    "int64": np.int64,
}
REDUCTIONS = ("sum", "min", "max")
ROOT = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """Settings of one run of `asyncpar bench`.

    ``sizes`` are bytes of the whole buffer, ``algorithm`` None leaves the choice to the cost model, ``budget`` is the
    approximate number of seconds for the iterations of one size; with ``calibrates`` lanes are measured for the cost
    model first, with ``shares`` the arrays are in memory that the ranks of a host share (``Node.empty``).
    """

    operations: tuple[str, ...] = ("all_reduce",)
    sizes: tuple[int, ...]
    dtype: str = "float32"
    reduction: ReduceOp = "sum"
    algorithm: str | None = None
    budget: float = 0.5
    calibrates: bool = False
    shares: bool = False

    def __post_init__(self) -> None:
        for operation in self.operations:
            _check_choice("op", operation, OPERATIONS)
            if self.algorithm is not None:
                check_algorithm(cost_name(operation), self.algorithm)
        _check_choice("--dtype", self.dtype, tuple(DTYPES))
        _check_choice("--redop", self.reduction, REDUCTIONS)
        if not self.operations or not self.sizes:
            raise UsageError("op: expected at least one operation and one size, got none")
        if not (math.isfinite(self.budget) and 0.0 < self.budget <= 3600.0):
            raise UsageError(f"--budget: expected seconds above 0 and at most 3600, got {self.budget:g}")

    @property
    def itemsize(self) -> int:
        return np.dtype(DTYPES[self.dtype]).itemsize

    def memory_of(self, ranks: int) -> int:
        """Return the bytes of the arrays of ``ranks`` ranks on one host at the largest size."""
        buffers = 1 if all(operation in WHOLE for operation in self.operations) else 2
        return ranks * buffers * max(self.sizes)


def cost_name(operation: str) -> str:
    """Return the operation of the cost model whose algorithms ``operation`` uses."""
    return operation.removesuffix("_many")


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
