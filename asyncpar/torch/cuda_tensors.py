"""The tensors of one call on a CUDA device: as rows of memory, before and after the communicator has moved them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from asyncpar.device.arrays import device_array
from asyncpar.errors import UsageError
from asyncpar.torch.arrays import is_reducible
from asyncpar.torch.reductions import TorchReduction


class CallTensors:
    """The tensors of one call on their device, and the stream that is current there."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self.device = next(tensor.device for tensor in tensors if isinstance(tensor, Tensor))
        self._stream = current_stream(self.device)
        self.later: list[Callable[[], object]] = []
        """Callbacks that take over results, in the stream of the call."""

    def on(self) -> AbstractContextManager[object]:
        """Make the stream of the call current in the block, in any thread."""
        return in_stream(self._stream)

    def take_over(self, result: Any) -> Any:
        """Copy results into the tensors of the caller."""
        with self.on():
            for action in self.later:
                action()
        return result

    def followed(self) -> None:
        """Make the current stream wait for that of the call."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def flat(self, tensor: Any, name: str, *, is_reduced: bool = False) -> Tensor:
        """Return the elements of ``tensor`` as a vector: its memory if it is contiguous, else a copy.

        Dtypes that can only be moved are returned as bytes, or refused if they are to be reduced.
        """
        _check(tensor, name, self.device)
        row = tensor.detach().contiguous().view(-1)
        if is_reducible(tensor.dtype):
            return row
        if is_reduced:
            raise UsageError(f"{name}: expected a dtype that can be reduced, got {tensor.dtype}; it can only be moved")
        return as_bytes(row)

    def landing(self, tensor: Any, name: str, *, is_reduced: bool = False, has_input: bool = False) -> Tensor:
        """Return memory for a result: that of ``tensor``, or a vector that is copied into it later.

        With ``has_input`` it holds the elements of ``tensor``.
        """
        row = self.flat(tensor, name, is_reduced=is_reduced)
        if tensor.numel() and row.data_ptr() != tensor.data_ptr():
            row = row if has_input else torch.empty_like(row)
            self.later.append(lambda: tensor.detach().copy_(row.view(tensor.dtype).view(tensor.shape)))
        return row

    def array(self, tensor: Tensor) -> Any:
        """Return ``tensor`` as a ``DeviceArray`` for the communicator, after the work of the call's stream."""
        found = device_array(tensor, "tensor")
        return found if self._stream is None else replace(found, stream=int(self._stream.cuda_stream) or 1)


def current_stream(device: torch.device) -> Any:
    """Return the current stream of this thread; None for tensors that only pretend to be on a device."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def in_stream(stream: Any) -> AbstractContextManager[object]:
    """Make ``stream`` current in the block."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _check(tensor: Any, name: str, device: torch.device) -> None:
    if not isinstance(tensor, Tensor):
        raise UsageError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.device != device:
        raise UsageError(f"{name}: expected a tensor on {device} like the others, got one on {tensor.device}")
    if tensor.layout is not torch.strided:
        raise UsageError(f"{name}: expected a dense tensor, got layout {tensor.layout}; pass tensor.to_dense()")
    if tensor.is_neg() or tensor.is_conj():
        raise UsageError(
            f"{name}: expected a tensor that holds its values, got a lazy conjugate; pass tensor.resolve_conj() or "
            "tensor.resolve_neg()"
        )


def check_like(tensor: Tensor, like: Tensor, name: str, rank: int) -> None:
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise UsageError(
            f"{name}[{rank}]: expected {like.dtype}{list(like.shape)} like the other tensor, "
            f"got {tensor.dtype}{list(tensor.shape)}"
        )


def scale(tensor: Tensor, reduction: TorchReduction) -> None:
    """Multiply the inputs of a reduction by its factor, in place."""
    if reduction.factor is None:
        return
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        raise UsageError(f"op: PREMUL_SUM needs a floating dtype, as {tensor.dtype} cannot hold the products")
    factor = reduction.factor
    tensor.mul_(factor.to(tensor.dtype) if isinstance(factor, Tensor) else factor)


def copy_to(parts: Any, targets: Sequence[Tensor]) -> None:
    for part, target in zip(parts, targets, strict=True):
        target.detach().copy_(part.clone().view(target.dtype).view(target.shape))


def as_bytes(row: Tensor) -> Tensor:
    return row.view(torch.uint8)


def units(tensor: Tensor) -> int:
    """Return the number of elements as which one element of ``tensor`` is moved."""
    return 1 if is_reducible(tensor.dtype) else tensor.itemsize


def overlap(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
