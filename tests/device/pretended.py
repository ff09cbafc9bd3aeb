"""CPU tensors that pass for tensors on CUDA devices, for programs that are to run on GPUs.

Kernels and copies run as soon as they are enqueued, as those of torch on CPU tensors do; operations of NCCL are those
of the fake.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import pytest

from asyncpar.collectives.arrays import Array
from asyncpar.device import arrays
from tests.device.fake_devices import FakeCluster, StreamWork

if TYPE_CHECKING:
    import torch


class EagerCluster(FakeCluster):
    """Devices whose streams run on at once, and which reach the memory of the host, too."""

    def __init__(self) -> None:
        super().__init__(longest_delay=0)

    def memory(self, address: int, nbytes: int) -> Array:
        if any(start <= address < start + len(block) for start, (block, _) in self._memory.items()):
            return super().memory(address, nbytes)
        return np.frombuffer(memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B"), np.uint8)

    def enqueue(self, stream: int, work: StreamWork) -> None:
        with self.lock:
            super().enqueue(stream, work)
            queue, left = self._streams[stream], -1
            while queue and len(queue) != left:
                left = len(queue)
                self._run_head(queue)


def let_tensors_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let CPU tensors pass for tensors on CUDA device 0, and the legacy default stream for theirs."""
    import torch

    interface = arrays._interface  # noqa: SLF001  # what real tensors say of themselves

    def of_tensor(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return interface(value)
        if value.requires_grad:
            return RuntimeError("it requires a gradient")
        strides = None if value.is_contiguous() else tuple(step * value.itemsize for step in value.stride())
        data = (value.data_ptr(), False)
        typestr, shape = typestr_of(value.dtype), tuple(value.shape)
        return {"shape": shape, "typestr": typestr, "data": data, "strides": strides, "version": 3}

    monkeypatch.setattr(arrays, "_interface", of_tensor)
    monkeypatch.setattr(arrays, "_device_of", lambda _: 0)
    monkeypatch.setattr(arrays, "current_stream", lambda _, __: 1)


def typestr_of(dtype: torch.dtype) -> str:
    """Return what ``__cuda_array_interface__`` says for ``dtype``."""
    name = str(dtype).removeprefix("torch.")
    return "<V2" if name == "bfloat16" else np.dtype(name).str
