"""The dtypes that are saved, by their names in numpy and in safetensors.  Pure."""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np

from asyncpar.errors import UsageError

_CODES: Final = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}


_SPECIAL: Final = {"bfloat16": np.dtype(ml_dtypes.bfloat16)}


def check_dtype(dtype: np.dtype[Any], what: str) -> str:
    """Return the name of ``dtype``.  Raises ``UsageError`` naming ``what`` for one that cannot be saved."""
    if dtype.name not in _CODES or not dtype.isnative:
        raise UsageError(f"{what}: expected one of the dtypes {', '.join(_CODES)}, got {dtype!r}")
    return dtype.name


def dtype_named(name: str) -> np.dtype[Any] | None:
    """Return the dtype that ``check_dtype`` calls ``name``; None if there is none."""
    if name not in _CODES:
        return None
    return _SPECIAL[name] if name in _SPECIAL else np.dtype(name)


def code_of(name: str) -> str:
    """Return what safetensors calls the dtype ``name``."""
    return _CODES[name]
