"""The kernels of torch on the devices of a ``FakeCluster``: on CPU tensors over its memory, in its streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from asyncpar.device.arrays import DeviceArray
from asyncpar.device.codecs.torch_kernels import TorchLibrary
from tests.device.fake_devices import FakeCluster


class TorchOnFake(TorchLibrary):
    """torch, but for how it comes to memory and streams of CUDA."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster

    def view(self, array: DeviceArray) -> torch.Tensor:
        bytes_there: Any = torch.from_numpy(self._cluster.memory(array.pointer, array.nbytes))
        return bytes_there.view(getattr(torch, array.dtype.name))

    def launch(self, work: Callable[[], None], *, device: int, stream: int) -> None:
        self._cluster.run(work, stream)
