"""The dtype of sums: two-byte types lack the precision to add many values, so their sums are kept in float32.

A bfloat16 has eight bits of precision: from 256 on, adding one changes nothing.  A float16 ends at 65,504.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_NARROW_BYTES = 2


def is_narrow(dtype: np.dtype[Any]) -> bool:
    """Return whether this floating dtype, one of ``ml_dtypes`` included, is too narrow for sums of many values."""
    return dtype.itemsize <= _NARROW_BYTES and dtype.kind in "fV"


def sum_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype for sums of values of ``dtype``: float32 for narrow ones, else the same."""
    return np.dtype(np.float32) if is_narrow(dtype) else dtype


def narrowed(total: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return ``total`` as ``dtype``, without a copy if it has it already; values out of range become infinite."""
    with np.errstate(over="ignore"):
        return total.astype(dtype, copy=False)
