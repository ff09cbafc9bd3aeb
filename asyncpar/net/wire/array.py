"""Arrays in payloads: sendable dtypes, descriptions of arrays, and views on received bytes.

A description is, little endian: dtype code (1 byte), number of dimensions (1), offset of the first element (8), and the
shape (8 each).
"""

from __future__ import annotations

import math
import struct
from typing import Any, Final, get_args

import ml_dtypes
import numpy as np
import numpy.typing as npt

from asyncpar.errors import ProtocolError, UsageError

AnyArray = npt.NDArray[Any]
Buffer = bytes | bytearray | memoryview

_DESCRIPTION = struct.Struct("<BBQ")
_MAX_DIMENSIONS: Final = 64

_DTYPES: Final[dict[int, np.dtype[Any]]] = {
    1: np.dtype(np.bool_),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<u1"),
    7: np.dtype("<u2"),
    8: np.dtype("<u4"),
    9: np.dtype("<u8"),
    10: np.dtype("<f2"),
    11: np.dtype("<f4"),
    12: np.dtype("<f8"),
    13: np.dtype("<c8"),
    14: np.dtype("<c16"),
    15: np.dtype(ml_dtypes.bfloat16),
    16: np.dtype(ml_dtypes.float8_e4m3fn),
    17: np.dtype(ml_dtypes.float8_e5m2),
}
"""The closed table of dtypes.  Part of the protocol: codes are never reused."""

_CODES: Final = {dtype: code for code, dtype in _DTYPES.items()}
SCALARS: Final = frozenset(dtype.type for dtype in _CODES)
"""The types of numpy scalars that can be sent."""
_NAMED: Final = {dtype.name: dtype for dtype in _DTYPES.values()}


def is_sendable(dtype: np.dtype[Any]) -> bool:
    """Return whether arrays of ``dtype`` can be sent."""
    return _code(dtype) is not None


def find_dtype(name: str) -> np.dtype[Any] | None:
    """Return the dtype called ``name`` (``float32``) in little endian, None unless arrays of it can be sent."""
    return _NAMED.get(name)


def describe_array(array: AnyArray, offset: int, *, what: str) -> bytes:
    """Return the description of ``array`` at ``offset``.

    Raises ``UsageError`` naming ``what`` for a dtype that cannot be sent and for masked arrays.
    """
    code = _code(array.dtype)
    if code is None:
        names = ", ".join(dtype.name for dtype in _CODES)
        raise UsageError(f"{what}: an array of dtype {array.dtype} cannot be sent; expected one of {names}")
    if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):  # numpy imports `ma` on first access
        raise UsageError(f"{what}: a masked array cannot be sent; send its data and its mask")
    return _DESCRIPTION.pack(code, array.ndim, offset) + struct.pack(f"<{array.ndim}Q", *array.shape)


def lend_array(array: AnyArray) -> memoryview | None:
    """Return the elements of ``array`` in wire format, in its own memory; None if they have another layout."""
    if not array.flags.c_contiguous or array.dtype not in _CODES:
        return None
    return np.asarray(array).reshape(-1).view(np.uint8).data


def write_array(array: AnyArray, memory: memoryview, offset: int) -> None:
    """Copy the elements of ``array``, in C order and little endian, into ``memory`` from ``offset`` on."""
    code = _code(array.dtype)
    assert code is not None, "the array was described before"
    landing: AnyArray = np.ndarray(array.shape, _DTYPES[code], buffer=memory, offset=offset)
    landing[...] = array


def view_array(description: Buffer, payload: Buffer, start: int) -> AnyArray:
    """Return the array of ``description`` as a view on ``payload``, whose attachments begin at ``start``.

    Raises ``ProtocolError`` for anything that ``describe_array`` does not produce and for arrays that exceed
    ``payload``.
    """
    if len(description) < _DESCRIPTION.size:
        raise ProtocolError(f"array: a description of {len(description)} bytes is too short")
    code, dimensions, offset = _DESCRIPTION.unpack_from(description)
    dtype = _DTYPES.get(code)
    if dtype is None:
        raise ProtocolError(f"array: dtype code {code} is not known here")
    if dimensions > _MAX_DIMENSIONS or len(description) != _DESCRIPTION.size + 8 * dimensions:
        raise ProtocolError(f"array: {dimensions} dimensions do not fit a description of {len(description)} bytes")
    shape = struct.unpack_from(f"<{dimensions}Q", description, _DESCRIPTION.size)
    size = math.prod(shape) * dtype.itemsize
    begin = start + offset
    if size and begin + size > len(payload):
        raise ProtocolError(f"array: shape {shape} of {dtype} at {begin} exceeds the payload of {len(payload)} bytes")
    try:
        return np.ndarray(shape, dtype, buffer=payload, offset=begin) if size else np.empty(shape, dtype)
    except (ValueError, OverflowError) as error:
        raise ProtocolError(f"array: shape {shape} of {dtype}: {error}") from error


def check_array(wanted: Any, value: object) -> AnyArray:
    """Return ``value`` if it is an array with elements of the kind named by the annotation ``NDArray[kind]``.

    Raises ``TypeError`` if it is not.
    """
    if not isinstance(value, np.ndarray):
        raise TypeError(f"Expected `numpy.ndarray`, got `{type_name(type(value))}`")
    for argument in get_args(wanted)[1:]:
        for scalar in get_args(argument):
            if isinstance(scalar, type) and not np.issubdtype(value.dtype, scalar):
                raise TypeError(f"Expected an array of `{type_name(scalar)}`, got one of `{value.dtype}`")
    return value


def type_name(kind: Any) -> str:
    """Return a type's name as people write it."""
    if not isinstance(kind, type) or get_args(kind):
        return str(kind)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _code(dtype: np.dtype[Any]) -> int | None:
    return _CODES.get(dtype) or (_CODES.get(dtype.newbyteorder("<")) if dtype.byteorder == ">" else None)
