"""Arguments and results of callers in other languages: messages of ``actors.proto`` to values, and back."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from asyncpar._proto.asyncpar.v1 import actors_pb2
from asyncpar.errors import UsageError
from asyncpar.runtime.ref import ActorRef
from asyncpar.wire.array import AnyArray, find_dtype, type_name

LARGEST_CONTENT: Final = (8 << 20) - (4 << 10)
"""Most bytes of a result: what a gRPC message holds, less what surrounds it."""

_ARRAY_EXTENSION: Final = 1
_PLACE = struct.Struct("<I")
_MOST_DIMENSIONS: Final = 64

Value = actors_pb2.Value


class ResultTooLarge(UsageError):  # noqa: N818
    """The result does not fit into one message."""


def read_value(value: Value, *, what: str) -> object:
    """Return what ``value`` stands for; arrays are views on it.  Raises ``UsageError`` naming ``what``."""
    kind = value.WhichOneof("kind")
    try:
        match kind:
            case "msgpack":
                return msgspec.msgpack.decode(value.msgpack, ext_hook=_array_finder(value, what))
            case "json":
                return msgspec.json.decode(value.json)
            case "array":
                return _read_array(value.array, what)
    except UsageError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise UsageError(
            f"{what}: expected one value of {value.WhichOneof('kind')}, got other bytes: {error}"
        ) from error
    raise UsageError(f"{what}: expected msgpack, json or an array, got an empty value")


def make_value(result: object, form: int, *, what: str) -> Value:
    """Return ``result`` in the form that the caller asked for.

    Raises ``UsageError`` naming ``what`` if it has no such form, and ``ResultTooLarge``.
    """
    if isinstance(result, np.ndarray):
        value = Value(array=_make_array(result, what))
    elif form == actors_pb2.ActorCall.JSON:
        value = Value(json=_encode(lambda: msgspec.json.encode(result, enc_hook=_lower_for_json(what)), what).decode())
    elif form == actors_pb2.ActorCall.MSGPACK:
        value = _make_msgpack(result, what)
    else:
        raise UsageError(f"format: expected MSGPACK or JSON, got {form}")
    size = value.ByteSize()
    if size > LARGEST_CONTENT:
        raise ResultTooLarge(f"{what}: at most {LARGEST_CONTENT} bytes fit into one message, got {size}")
    return value


def _array_finder(value: Value, what: str) -> Callable[[int, memoryview], AnyArray]:
    def find(code: int, content: memoryview) -> AnyArray:
        if code != _ARRAY_EXTENSION or len(content) != _PLACE.size:
            raise UsageError(
                f"{what}: expected extension type {_ARRAY_EXTENSION} with {_PLACE.size} bytes, got {code} with "
                f"{len(content)}"
            )
        (place,) = _PLACE.unpack(content)
        if place >= len(value.arrays):
            raise UsageError(f"{what}: it names array {place}, but comes with {len(value.arrays)}")
        return _read_array(value.arrays[place], f"{what}, array {place}")

    return find


def _read_array(array: actors_pb2.Array, what: str) -> AnyArray:
    dtype, shape = find_dtype(array.dtype), tuple(array.shape)
    if dtype is None:
        raise UsageError(f"{what}: expected a dtype that actors know, such as float32, got {array.dtype!r}")
    if len(shape) > _MOST_DIMENSIONS:
        raise UsageError(f"{what}: expected at most {_MOST_DIMENSIONS} dimensions, got {len(shape)}")
    size = math.prod(shape) * dtype.itemsize
    if size != len(array.content):
        raise UsageError(f"{what}: expected {size} bytes for shape {shape} of {dtype}, got {len(array.content)}")
    try:
        return np.ndarray(shape, dtype, buffer=array.content) if size else np.empty(shape, dtype)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"{what}: shape {shape} of {dtype}: {error}") from error


def _make_array(array: AnyArray, what: str) -> actors_pb2.Array:
    if array.nbytes > LARGEST_CONTENT:
        raise ResultTooLarge(f"{what}: at most {LARGEST_CONTENT} bytes fit into one message, got {array.nbytes}")
    dtype = find_dtype(array.dtype.name)
    if dtype is None:
        raise UsageError(f"{what}: an array of dtype {array.dtype} cannot be sent")
    content = array.astype(dtype, copy=False).tobytes()
    return actors_pb2.Array(dtype=dtype.name, shape=array.shape, content=content)


def _make_msgpack(result: object, what: str) -> Value:
    arrays: list[actors_pb2.Array] = []

    def lower(value: object) -> object:
        if isinstance(value, np.ndarray):
            arrays.append(_make_array(value, what))
            return Ext(_ARRAY_EXTENSION, _PLACE.pack(len(arrays) - 1))
        return _lower(value, what)

    encoded = _encode(lambda: msgspec.msgpack.encode(result, enc_hook=lower), what)
    return Value(msgpack=encoded, arrays=arrays)


def _lower_for_json(what: str) -> Callable[[object], object]:
    def lower(value: object) -> object:
        if isinstance(value, np.ndarray):
            raise UsageError(f"{what}: there are arrays inside, which JSON cannot hold; ask for MSGPACK")
        return _lower(value, what)

    return lower


def _lower(value: object, what: str) -> object:
    """Turn what only actors know into plain data."""
    if isinstance(value, ActorRef):
        return {"actor": value.name, "rank": value.rank}
    raise UsageError(f"{what}: a value of type {type_name(type(value))} cannot be sent")


def _encode(encode: Callable[[], bytes], what: str) -> bytes:
    try:
        encoded = encode()
    except UsageError:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(f"{what}: it cannot be sent: {error}") from error
    if len(encoded) > LARGEST_CONTENT:
        raise ResultTooLarge(f"{what}: at most {LARGEST_CONTENT} bytes fit into one message, got {len(encoded)}")
    return encoded
