"""Reading of a tensor's description from a DLPack capsule.  Source: dlpack.h, versions 0 and 1."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import msgspec
import numpy as np

_KINDS = {0: "i", 1: "u", 2: "f", 5: "c"}
_BFLOAT, _BOOL = 4, 6
_READ_ONLY = 1

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _VersionedTensor(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


class CapsuleTensor(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a DLPack capsule; ``strides`` in elements, None if contiguous.  The capsule owns the memory."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: np.dtype[Any]
    is_read_only: bool


def read(capsule: object) -> CapsuleTensor:
    """Return the description in ``capsule``, which stays the owner.  Raises ``ValueError`` for anything else."""
    api = ctypes.pythonapi
    api.PyCapsule_IsValid.argtypes = (ctypes.py_object, ctypes.c_char_p)
    api.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    is_read_only = False
    if api.PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        versioned = _VersionedTensor.from_address(api.PyCapsule_GetPointer(capsule, b"dltensor_versioned"))
        if versioned.major > 1:
            raise ValueError(f"DLPack: expected version 1 or older, got {versioned.major}.{versioned.minor}")
        tensor, is_read_only = versioned.tensor, bool(versioned.flags & _READ_ONLY)
    elif api.PyCapsule_IsValid(capsule, b"dltensor"):
        tensor = _Tensor.from_address(api.PyCapsule_GetPointer(capsule, b"dltensor"))
    else:
        raise ValueError("DLPack: expected a capsule that was not used yet")
    return CapsuleTensor(
        pointer=(tensor.data or 0) + tensor.byte_offset,
        shape=tuple(tensor.shape[: tensor.ndim]),
        strides=tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None,
        dtype=_dtype(tensor),
        is_read_only=is_read_only,
    )


def _dtype(tensor: _Tensor) -> np.dtype[Any]:
    code, bits = tensor.code, tensor.bits
    if tensor.lanes == 1 and bits % 8 == 0:
        if code == _BFLOAT and bits == 16:
            return BFLOAT16
        if code == _BOOL and bits == 8:
            return np.dtype(bool)
        if code in _KINDS:
            return np.dtype(f"{_KINDS[code]}{bits // 8}")
    raise ValueError(f"DLPack: no dtype has code {code}, {bits} bits and {tensor.lanes} lanes")
