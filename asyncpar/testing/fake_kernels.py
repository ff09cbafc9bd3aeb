"""Kernels on the devices of a ``FakeCluster``: numpy's functions, which run when their stream reaches them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from asyncpar.device.arrays import DeviceArray
from asyncpar.device.codecs.array_kernels import Array, ArrayLibrary


class FakeStreams(Protocol):
    """The part of a ``FakeCluster`` that kernels use."""

    def memory(self, address: int, nbytes: int) -> Array: ...

    def stream_device(self, stream: int) -> int | None: ...

    def run(self, work: Callable[[], object], stream: int) -> None: ...


class FakeKernels(ArrayLibrary):
    """A library of kernels for the arrays of ``cluster``."""

    def __init__(self, cluster: FakeStreams) -> None:
        super().__init__(np)
        self.name = "asyncpar"
        self.launches = 0
        """The number of times work was put into a stream."""
        self._cluster = cluster

    def view(self, array: DeviceArray) -> Array:
        return self._cluster.memory(array.pointer, array.nbytes).view(array.dtype)

    def launch(self, work: Callable[[], None], *, device: int, stream: int) -> None:
        self.launches += 1
        on = self._cluster.stream_device(stream)
        assert on in (None, device), f"a kernel of cuda:{device} in a stream of cuda:{on}"

        def run() -> None:
            with np.errstate(all="ignore"):
                work()

        self._cluster.run(run, stream)
