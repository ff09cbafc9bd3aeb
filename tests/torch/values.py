"""Values that every rank can compute for every other, small enough to be exact in every dtype."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

INTEGERS = ("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
NUMBERS = (*INTEGERS, *FLOATS, *COMPLEX)
MOVED = ("bool", *NUMBERS, *EIGHT_BITS)

BITS = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}


def dtype_of(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def draw(rank: int, dtype: str = "float32", shape: Sequence[int] = (5, 3), seed: int = 0) -> torch.Tensor:
    """Return what a rank has, by convention: whole numbers from 1 to 4."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    wide = torch.randint(1, 5, tuple(shape), generator=generator)
    if dtype == "bool":
        return wide > 2
    if dtype in COMPLEX:
        return torch.complex(wide.double(), wide.flip(0).double()).to(dtype_of(dtype))
    return wide.to(dtype_of(dtype))


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the widest dtype of its kind, where torch can compute everything."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64)


def reduced(op: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what reducing ``tensors`` must give."""
    stack = torch.stack([wide(tensor) for tensor in tensors])
    dtype = tensors[0].dtype
    match op:
        case "SUM":
            return stack.sum(0).to(dtype)
        case "AVG":
            return (stack.sum(0) / len(tensors)).to(dtype)
        case "PRODUCT":
            return stack.prod(0).to(dtype)
        case "MIN":
            return stack.amin(0).to(dtype)
        case "MAX":
            return stack.amax(0).to(dtype)
    return functools.reduce(BITS[op], stack).to(dtype)


def everyone(dtype: str = "float32", shape: Sequence[int] = (5, 3), seed: int = 0) -> list[torch.Tensor]:
    """Return what every rank of the default group has, by convention."""
    return [draw(rank, dtype, shape, seed) for rank in range(dist.get_world_size())]


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that two tensors have the same dtype, shape and bits."""
    assert got.dtype == expected.dtype, f"got {got.dtype}, expected {expected.dtype}"
    assert got.shape == expected.shape, f"got {got.shape}, expected {expected.shape}"
    if got.numel():
        bits = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (got, expected))
        assert torch.equal(*bits), f"got {got}, expected {expected}"


def assert_gone(reference: weakref.ref[Any]) -> None:
    """Assert that its object dies soon, without the collector: the thread that ended the operation may just let go."""
    deadline = time.monotonic() + 10.0
    while reference() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert reference() is None
