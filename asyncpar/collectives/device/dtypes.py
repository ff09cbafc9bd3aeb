"""The dtypes that NCCL can reduce and move.  Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from asyncpar.device.fabric import NcclDtype, NcclOp

_OF_BOOL = {"sum": NcclOp.MAX, "prod": NcclOp.MIN, "min": NcclOp.MIN, "max": NcclOp.MAX, "band": NcclOp.MIN,
            "bor": NcclOp.MAX}  # fmt: skip
_OF_NUMBERS = {"sum": NcclOp.SUM, "prod": NcclOp.PROD, "min": NcclOp.MIN, "max": NcclOp.MAX, "mean": NcclOp.AVG}
_REAL = {"complex64": NcclDtype.FLOAT32, "complex128": NcclDtype.FLOAT64}
_NAMES = frozenset(NcclDtype)


class NcclReduction(NamedTuple):
    """NCCL's way to combine: ``factor`` elements of ``dtype`` for one of ours; without ``is_known`` it has none."""

    dtype: NcclDtype
    op: NcclOp
    factor: int = 1
    is_known: bool = True


_UNKNOWN = NcclReduction(NcclDtype.UINT8, NcclOp.MAX, is_known=False)


def nccl_reduction(op: str, dtype: np.dtype[Any]) -> NcclReduction:
    """Return NCCL's way to do ``op`` on ``dtype``."""
    name = dtype.name
    if name == "bool":
        return NcclReduction(NcclDtype.UINT8, _OF_BOOL[op]) if op in _OF_BOOL else _UNKNOWN
    number = _OF_NUMBERS.get(op)
    if number is None:
        return _UNKNOWN
    if name in _REAL:
        return NcclReduction(_REAL[name], number, 2) if op in ("sum", "mean") else _UNKNOWN
    return NcclReduction(NcclDtype(name), number) if name in _NAMES else _UNKNOWN
