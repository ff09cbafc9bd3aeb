"""Arrays on CUDA devices, of any library: their descriptions, and the creation of results of the caller's kind.

An array is read through ``__cuda_array_interface__`` (version 3: https://numba.readthedocs.io/en/stable/cuda/
cuda_array_interface.html) or through DLPack (https://dmlc.github.io/dlpack).  No library is imported for it: the type
of an array names its library, which is loaded then.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from asyncpar.core.foreign_arrays import library_of
from asyncpar.device import dlpack
from asyncpar.device.fabric import LEGACY_DEFAULT_STREAM
from asyncpar.errors import UsageError

_CUDA_MEMORY = (2, 13)
"""``kDLCUDA`` and ``kDLCUDAManaged``."""

_IMMUTABLE = frozenset({"jax", "jaxlib"})
"""Libraries whose arrays must not be written once a program holds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceArray:
    """A contiguous array on CUDA device ``device``: ``owner``, the caller's object, keeps its memory alive.

    ``pointer`` is 0 for an array without elements.  ``stream`` is the caller's, after whose work the array may be used;
    None if it may be used at once.
    """

    pointer: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    device: int
    is_writable: bool
    stream: int | None
    owner: Any = field(repr=False)
    lease: object = field(default=None, repr=False)
    """Another object that keeps the memory alive: a DLPack capsule."""

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def kind(self) -> str:
        """The library of the array, by the name of its top module."""
        return library_of(self.owner)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} on cuda:{self.device}"


def is_device_array(value: object) -> bool:
    """Return whether this is an array on a CUDA device; false for numpy arrays and host arrays.  Never raises."""
    if isinstance(value, np.ndarray):
        return False
    if isinstance(value, DeviceArray) or _interface(value) is not None:
        return True
    ask = getattr(type(value), "__dlpack_device__", None)
    if ask is None:
        return False
    try:
        return int(ask(value)[0]) in _CUDA_MEMORY
    except (TypeError, ValueError, RuntimeError, BufferError):
        return False


def _interface(value: object) -> object:
    """Return the interface that ``value`` declares, None without one; an error of torch for tensors with a gradient."""
    try:
        return getattr(value, "__cuda_array_interface__", None)
    except RuntimeError as error:
        return error


def device_array(value: object, name: str = "x") -> DeviceArray:
    """Return the description of ``value``, which must be contiguous and on a CUDA device.

    Raises ``UsageError`` for anything else, naming the argument and what to do.
    """
    if isinstance(value, DeviceArray):
        return value
    if not is_device_array(value):
        raise UsageError(f"{name}: expected an array on a CUDA device, got {_described(value)}")
    interface = _interface(value)
    if isinstance(interface, RuntimeError):
        raise UsageError(f"{name}: its library does not hand out its memory: {interface}; pass x.detach()")
    found = _of_interface(value, interface, name) if isinstance(interface, dict) else _of_dlpack(value, name)
    if found.dtype.kind not in "biufc" and found.dtype != dlpack.BFLOAT16:
        raise UsageError(f"{name}: expected a numeric dtype, got {found.dtype!r}")
    return found


def check_writable(array: DeviceArray, name: str) -> DeviceArray:
    """Return ``array`` if results can be written to it."""
    if not array.is_writable:
        remedy = "pass a copy" if array.kind not in _IMMUTABLE else f"arrays of {array.kind} never change; pass no out"
        raise UsageError(f"{name}: expected a device array that can be written, got a read-only one; {remedy}")
    return array


def is_immutable(array: DeviceArray) -> bool:
    """Return whether its library's arrays never change; then an in-place operation makes a new array."""
    return array.kind in _IMMUTABLE


def empty_like(array: DeviceArray, shape: Sequence[int], *, dtype: np.dtype[Any] | None = None) -> DeviceArray:
    """Return a new uninitialized array of ``shape``, made by the library of ``array`` on its device.

    ``dtype`` is one of numpy's own (None: that of ``array``).
    """
    dtype = None if dtype == array.dtype else dtype
    shape = tuple(shape)
    owner = array.owner
    library = array.kind
    make = getattr(type(owner), "__asyncpar_empty__", None)
    made: Any
    if make is not None:
        made = make(owner, shape) if dtype is None else make(owner, shape, dtype)
    elif library == "torch":
        made = owner.new_empty(shape, dtype=None if dtype is None else getattr(sys.modules["torch"], dtype.name))
    elif library == "cupy":
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(array.device):
            made = cupy.empty(shape, dtype or owner.dtype)
    elif library in _IMMUTABLE:
        jax = sys.modules["jax"]
        made = jax.device_put(jax.numpy.empty(shape, dtype or owner.dtype), next(iter(owner.devices())))
        made.block_until_ready()
    else:
        raise UsageError(f"out: expected an array for the result, as asyncpar cannot make arrays of {library}")
    found = device_array(made, "out")
    return DeviceArray(
        pointer=found.pointer,
        shape=found.shape,
        dtype=found.dtype,
        device=found.device,
        is_writable=True,
        stream=found.stream,
        owner=made,
        lease=found.lease,
    )


def current_stream(value: object, device: int) -> int:
    """Return the current stream of the library of ``value`` on ``device``, or the legacy default stream."""
    library = library_of(value)
    ask = getattr(type(value), "__asyncpar_stream__", None)
    stream = LEGACY_DEFAULT_STREAM
    if ask is not None:
        stream = int(ask(value))
    elif library == "torch":
        stream = int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)
    elif library == "cupy":
        stream = int(sys.modules["cupy"].cuda.get_current_stream(device).ptr)
    return stream or LEGACY_DEFAULT_STREAM


def stream_handle(stream: object) -> int:
    """Return the handle of a stream: an integer, or a stream of torch, CuPy or cuda.core (``__cuda_stream__``)."""
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream or LEGACY_DEFAULT_STREAM
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        _, handle = protocol() if callable(protocol) else protocol
        return int(handle) or LEGACY_DEFAULT_STREAM
    for attribute in ("cuda_stream", "ptr"):
        handle = getattr(stream, attribute, None)
        if isinstance(handle, int):
            return handle or LEGACY_DEFAULT_STREAM
    raise UsageError(f"stream: expected a CUDA stream or its handle, got {type(stream).__name__}")


def _of_interface(value: object, interface: dict[str, Any], name: str) -> DeviceArray:
    try:
        shape = tuple(int(length) for length in interface["shape"])
        pointer, is_read_only = interface["data"]
        typestr, strides = str(interface["typestr"]), interface.get("strides")
        stream = interface.get("stream")
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{name}: its __cuda_array_interface__ is not one: {error!r}") from error
    if interface.get("mask") is not None:
        raise UsageError(f"{name}: expected an array without a mask, got a masked one")
    if stream == 0:
        raise UsageError(f"{name}: its __cuda_array_interface__ names stream 0, which version 3 forbids")
    dtype = _dtype(value, typestr, name)
    _check_contiguous(shape, strides, dtype.itemsize, name)
    device = _device_of(value)
    is_writable = not is_read_only and library_of(value) not in _IMMUTABLE
    has_elements = math.prod(shape) > 0
    return DeviceArray(
        pointer=int(pointer or 0) if has_elements else 0,
        shape=shape,
        dtype=dtype,
        device=device,
        is_writable=is_writable,
        stream=current_stream(value, device) if stream is None else int(stream),
        owner=value,
    )


def _of_dlpack(value: Any, name: str) -> DeviceArray:
    device = int(value.__dlpack_device__()[1])
    stream = current_stream(value, device)
    try:
        capsule = value.__dlpack__(stream=stream)
        tensor = dlpack.read(capsule)
    except (TypeError, ValueError, RuntimeError, BufferError, AttributeError) as error:
        raise UsageError(f"{name}: {type(value).__name__} does not hand out its memory: {error}") from error
    strides = None if tensor.strides is None else tuple(step * tensor.dtype.itemsize for step in tensor.strides)
    _check_contiguous(tensor.shape, strides, tensor.dtype.itemsize, name)
    return DeviceArray(
        pointer=tensor.pointer if math.prod(tensor.shape) else 0,
        shape=tensor.shape,
        dtype=tensor.dtype,
        device=device,
        is_writable=not tensor.is_read_only and library_of(value) not in _IMMUTABLE,
        stream=stream,
        owner=value,
        lease=capsule,
    )


def _dtype(value: object, typestr: str, name: str) -> np.dtype[Any]:
    """Return the dtype of an array; bfloat16, which ``typestr`` cannot express, is taken from the array itself."""
    if typestr[1:] in ("V2", "E") or "bfloat16" in str(getattr(value, "dtype", "")):
        if "bfloat16" in str(getattr(value, "dtype", "")):
            return dlpack.BFLOAT16
        raise UsageError(f"{name}: expected a numeric dtype, got {typestr!r}")
    try:
        dtype: np.dtype[Any] = np.dtype(typestr)
    except TypeError as error:
        raise UsageError(f"{name}: expected a numeric dtype, got {typestr!r}") from error
    if not dtype.isnative:
        raise UsageError(f"{name}: expected native byte order, got {typestr!r}")
    return dtype


def _device_of(value: Any) -> int:
    """Return the device index of an array with ``__cuda_array_interface__``, which does not contain it."""
    ask = getattr(value, "__dlpack_device__", None)
    if ask is not None:
        try:
            return int(ask()[1])
        except (TypeError, ValueError, RuntimeError, BufferError):
            pass  # arrays that cannot be exported now, such as torch's with a gradient, have a device all the same
    device = getattr(value, "device", None)
    for attribute in ("index", "id", "device_id"):
        index = getattr(device, attribute, None)
        if isinstance(index, int):
            return index
    return 0


def _check_contiguous(shape: Sequence[int], strides: Sequence[int] | None, itemsize: int, name: str) -> None:
    if strides is None or 0 in shape:
        return
    step = itemsize
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != step:
            raise UsageError(
                f"{name}: expected a contiguous device array, got shape {tuple(shape)} with strides {tuple(strides)}; "
                "pass a contiguous copy (x.contiguous() in torch, cupy.ascontiguousarray(x))"
            )
        step *= length


def _described(value: object) -> str:
    if isinstance(value, np.ndarray):
        return "a numpy array, which is on the host; pass device arrays on all ranks or on none"
    return f"{type(value).__module__}.{type(value).__qualname__}"
