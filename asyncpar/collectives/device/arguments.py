"""Checks of device arrays as arguments of collectives, like those of ``collectives.arrays`` for numpy.  Pure."""

from __future__ import annotations

from collections.abc import Sequence

from asyncpar.collectives.arrays import LARGEST_LENGTH
from asyncpar.core.config.slicing import ceil_chunks
from asyncpar.device.arrays import DeviceArray, check_writable, device_array, empty_like, is_immutable
from asyncpar.errors import ProtocolError, UsageError


def shown(array: DeviceArray, *, rows_differ: bool = False) -> str:
    """Return the description that all ranks must agree on: ``float32[2,3]``."""
    lengths = ["?" if rows_differ and axis == 0 else str(length) for axis, length in enumerate(array.shape)]
    return f"{array.dtype.name}[{','.join(lengths)}]"


def in_place(source: DeviceArray, out: object, name: str = "x") -> DeviceArray:
    """Return the target of a result in place: ``out``, else ``source``, or a new array if that is immutable."""
    if out is not None and out is not source.owner:
        return reduced(source, out, source.shape)
    if is_immutable(source):
        return empty_like(source, source.shape)
    return check_writable(source, name)


def reduced(source: DeviceArray, out: object, shape: Sequence[int], *, of: str = "the result") -> DeviceArray:
    """Return ``out`` if it fits the result, or a new array of the library of ``source`` if it is None."""
    if out is None:
        return empty_like(source, shape)
    array = check_writable(device_array(out, "out"), "out")
    if array.shape != tuple(shape) or array.dtype != source.dtype:
        raise UsageError(f"out: expected {source.dtype}{list(shape)} for {of}, got {array.dtype}{list(array.shape)}")
    return array


def allocated(source: DeviceArray | None, out: object, root: int) -> DeviceArray:
    """Return the target of this rank's part of a scatter; ``source`` is the array that the root scatters."""
    if source is not None:
        return reduced(source, out, source.shape[1:])
    if out is None:
        raise UsageError(f"out: expected an array on every rank but root {root}, to give shape and dtype; got None")
    return check_writable(device_array(out, "out"), "out")


def check_rows(array: DeviceArray) -> DeviceArray:
    """Return ``array``; raise unless it has an axis 0."""
    if not array.shape:
        raise UsageError("x: expected an array with at least one dimension, got a scalar array")
    return array


def check_leading(array: DeviceArray, size: int) -> DeviceArray:
    """Return ``array``; raise unless its axis 0 has one entry per rank."""
    if not array.shape or array.shape[0] != size:
        raise UsageError(f"x: expected shape ({size}, ...), one entry per rank, got {array.shape}")
    return array


def check_apart(array: DeviceArray, out: DeviceArray) -> None:
    """Raise if the two share memory."""
    if array.nbytes and out.nbytes:
        starts_before_end = array.pointer < out.pointer + out.nbytes
        if starts_before_end and out.pointer < array.pointer + array.nbytes:
            raise UsageError("out: expected other memory than x, got an array that overlaps it")


def check_lengths(lengths: list[int]) -> list[int]:
    """Return lengths received from other ranks.  Raises ``ProtocolError`` for invalid ones."""
    if min(lengths) < 0 or max(lengths) > LARGEST_LENGTH:
        raise ProtocolError(f"lengths from other ranks: expected 0..{LARGEST_LENGTH}, got {lengths}")
    return lengths


def slices(array: DeviceArray, size: int) -> list[tuple[int, int]]:
    """Return the range of rows of each rank's slice."""
    return list(ceil_chunks(array.shape[0], size))
