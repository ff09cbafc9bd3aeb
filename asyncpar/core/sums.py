"""The dtype of sums: two bytes have too few digits to add many values, so sums of them are kept in float32.

A bfloat16 has eight bits of precision: from 256 on, adding one changes nothing.  A float16 ends at 65,504.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_NARROW_BYTES = 2


def is_narrow(dtype: np.dtype[Any]) -> bool:
    """Is this a floating dtype, one of ``ml_dtypes`` too, in which sums of many values go wrong?"""
    return dtype.itemsize <= _NARROW_BYTES and dtype.kind in "fV"


def sum_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype to add up values of ``dtype`` in: float32 for narrow ones, else the same."""
    return np.dtype(np.float32) if is_narrow(dtype) else dtype


def narrowed(total: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return ``total`` in ``dtype``, itself if it is of it; what is too large for ``dtype`` becomes infinite."""
    with np.errstate(over="ignore"):
        return total.astype(dtype, copy=False)
