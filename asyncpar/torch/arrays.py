"""Tensors as numpy arrays over the same memory, and arrays as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

from asyncpar.collectives.arrays import Array
from asyncpar.errors import UsageError

_SHARED: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.int64: np.dtype(np.int64),
    torch.int32: np.dtype(np.int32),
    torch.int16: np.dtype(np.int16),
    torch.int8: np.dtype(np.int8),
    torch.uint8: np.dtype(np.uint8),
    torch.uint16: np.dtype(np.uint16),
    torch.uint32: np.dtype(np.uint32),
    torch.uint64: np.dtype(np.uint64),
    torch.bool: np.dtype(np.bool_),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
}
"""Dtypes that collectives can reduce."""

_INTEGERS: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}

_NAMES = {dtype: dtype.str for dtype in [*_SHARED.values(), *_INTEGERS.values()]}


def is_reducible(dtype: torch.dtype) -> bool:
    """Return whether collectives can combine tensors of ``dtype`` rather than only move them."""
    return dtype in _SHARED


def bits_detail(tensors: Sequence[torch.Tensor]) -> str:
    """Return the dtypes that are moved as integers, on which ranks must also agree; empty if there are none."""
    return ", ".join(str(tensor.dtype) for tensor in tensors if tensor.dtype not in _SHARED)


class _Memory:
    """Exposes a tensor's memory to numpy, and keeps it alive.

    ``Tensor.numpy`` would do so, too, but then the storage could never be resized again, as FSDP does to free it.
    """

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: torch.Tensor, dtype: np.dtype[Any], address: int) -> None:
        strides = None
        if not tensor.is_contiguous():
            strides = tuple([step * dtype.itemsize for step in tensor.stride()])
        self.tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "shape": tensor.shape,
            "typestr": _NAMES[dtype],
            "data": (address, False),
            "strides": strides,
        }


def array_of(tensor: torch.Tensor, name: str = "tensor", *, as_bits: bool = False) -> Array:
    """Return ``tensor``'s elements as an array that shares its memory, with the same shape and strides.

    Autograd does not see writes to it.  ``as_bits`` exposes dtypes that can be moved but not reduced (``float8`` and
    such) as integers.  Raises ``UsageError`` for anything but a dense tensor in the CPU's memory.
    """
    check_tensor(tensor, name)
    dtype = _SHARED.get(tensor.dtype)
    if dtype is None:
        dtype = _INTEGERS.get(tensor.dtype.itemsize) if as_bits else None
        if dtype is None:
            raise UsageError(f"{name}: expected a dtype that can be reduced, got {tensor.dtype}; it can only be moved")
        if tensor.is_quantized:
            raise UsageError(
                f"{name}: expected a tensor without a scale of its own, got a quantized one; pass int_repr()"
            )
    address = tensor.data_ptr()
    if not address and tensor.numel():
        raise UsageError(
            f"{name}: expected a tensor with memory, got a {type(tensor).__name__} that has none of its own"
        )
    if dtype.kind == "V":  # one of ml_dtypes: numpy knows it only by its object
        return np.asarray(_Memory(tensor, _INTEGERS[dtype.itemsize], address)).view(dtype)
    return np.asarray(_Memory(tensor, dtype, address))


def check_tensor(tensor: torch.Tensor, name: str) -> None:
    """Raise ``UsageError`` unless an array can share the memory of ``tensor``."""
    if isinstance(tensor, torch.Tensor) and tensor.is_cpu and tensor.layout is torch.strided:
        if not (tensor.is_neg() or tensor.is_conj()):
            return
        raise UsageError(
            f"{name}: expected a tensor that holds its values, got a lazy conjugate; pass tensor.resolve_conj() or "
            "tensor.resolve_neg()"
        )
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if not tensor.is_cpu:
        raise UsageError(
            f"{name}: expected a tensor in the CPU's memory like the others, got one on {tensor.device}; "
            "pass tensor.cpu()"
        )
    raise UsageError(f"{name}: expected a dense tensor, got layout {tensor.layout}; pass tensor.to_dense()")


def as_list(tensors: torch.Tensor | Sequence[torch.Tensor], name: str = "tensors") -> list[torch.Tensor]:
    """Return the tensors of an argument that may be one tensor or several."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    found = list(tensors)
    if not found:
        raise UsageError(f"{name}: expected at least one tensor, got none")
    return found


def only(tensors: torch.Tensor | Sequence[torch.Tensor], name: str, *, instead: str = "") -> torch.Tensor:
    """Return the one tensor of an argument that may be wrapped in a list; ``instead`` names one for several."""
    found = as_list(tensors, name)
    if len(found) != 1:
        hint = f"; {instead} takes several" if instead else ""
        raise UsageError(f"{name}: expected one tensor per rank, got {len(found)}{hint}")
    if not isinstance(found[0], torch.Tensor):
        raise UsageError(f"{name}: expected a tensor, got {type(found[0]).__name__}")
    return found[0]


def unwrapped(tensors: Any, name: str) -> list[torch.Tensor]:
    """Return the list of tensors of an argument that may be wrapped in another list as its only element."""
    if not tensors or isinstance(tensors[0], torch.Tensor):
        return list(tensors)
    if len(tensors) > 1:
        raise UsageError(f"{name}: expected one list of tensors, as each rank passes one tensor, got {len(tensors)}")
    return list(tensors[0])


def of_root(tensors: Any, name: str, *, is_root: bool) -> list[torch.Tensor]:
    """Return the list of tensors that the root passes, and no other rank."""
    found = [] if tensors is None else unwrapped(tensors, name)
    if found and not is_root:
        raise UsageError(f"{name}: expected none on a rank that is not the root, got {len(found)}")
    return found


def check_same_dtype(tensors: Sequence[torch.Tensor], name: str) -> None:
    """Raise ``UsageError`` unless all of ``tensors`` are tensors of one dtype."""
    dtypes = dict.fromkeys(tensor.dtype for tensor in tensors if isinstance(tensor, torch.Tensor))
    if len(dtypes) > 1:
        raise UsageError(f"{name}: expected tensors of one dtype, got {' and '.join(map(str, dtypes))}")


def pairs(outputs: Sequence[Any], inputs: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return each output with its input; raises ``UsageError`` unless there are equally many."""
    if len(outputs) != len(inputs):
        raise UsageError(f"outputs: expected as many as inputs, {len(inputs)}, got {len(outputs)}")
    return [*zip(outputs, inputs, strict=True)]


def flat(tensor: torch.Tensor, name: str, *, as_bits: bool = True) -> Array:
    """Return the elements of ``tensor`` as a vector: its memory if it is contiguous, else a copy."""
    return array_of(tensor, name, as_bits=as_bits).reshape(-1)


class Landing:
    """Contiguous memory for a result: the tensor's own, or an array that ``settle`` copies into it."""

    __slots__ = ("_target", "array")

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        target = array_of(tensor, name, as_bits=True)
        self._target: Array | None = None
        if target.flags.c_contiguous:
            self.array = target.reshape(-1)
        else:
            self._target = target
            self.array = np.empty(target.size, target.dtype)

    def settle(self) -> None:
        """Copy the result into the tensor, if it was received elsewhere."""
        if self._target is not None:
            self._target[...] = self.array.reshape(self._target.shape)


_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def tensor_of(array: Any, name: str = "array") -> torch.Tensor:
    """Return a tensor over the memory of ``array``; a tensor is returned detached from autograd.

    Memory that torch cannot share is copied: read-only memory, strides that are negative or no multiple of the element
    size, foreign byte order.  Raises ``UsageError`` for dtypes that torch does not have.
    """
    if isinstance(array, torch.Tensor):
        return array.detach()
    shared = np.asarray(array)
    if not _can_share(shared):
        shared = shared.astype(shared.dtype.newbyteorder("="), order="C", copy=True)
    if shared.dtype == _BFLOAT16:
        return torch.from_numpy(shared.view(np.uint16)).view(torch.bfloat16)
    try:
        return torch.from_numpy(shared)
    except TypeError as error:
        raise UsageError(f"{name}: expected a dtype that torch has, got {shared.dtype}") from error


def _can_share(array: np.ndarray[Any, Any]) -> bool:
    steps = (stride >= 0 and stride % max(1, array.itemsize) == 0 for stride in array.strides)
    return array.flags.writeable and array.dtype.isnative and all(steps)
