"""Communicators that move numpy arrays as tensors of torch, and worlds of them over NCCL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from asyncpar.collectives.arrays import Array
from asyncpar.collectives.device.host import use_fabric
from asyncpar.device.nccl import open_nccl_fabric
from asyncpar.node import Node
from asyncpar.testing.world import local_world
from tests.device.device_worlds import OnDevices


class OnTorch(OnDevices):
    """Copies numpy arrays to tensors on CUDA device ``device``, or on ``device`` by torch's name."""

    def _staged(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray) or value.dtype.kind == "O":
            return value
        return to_device(value, self._device)

    def _on_host(self, found: Any) -> Array | None:
        import torch

        return to_host(found) if isinstance(found, torch.Tensor) else None


def to_device(values: Array, device: Any) -> Any:
    """Return a tensor with ``values`` on ``device``."""
    from asyncpar.torch.arrays import tensor_of

    return tensor_of(values.copy()).to(device)


def to_host(tensor: Any) -> Array:
    """Return the values of ``tensor``, which wait for its stream."""
    from asyncpar.torch.arrays import array_of

    return array_of(tensor.detach().cpu().contiguous()).copy()


@asynccontextmanager
async def nccl_world(
    size: int, *, devices: int, hosts: Sequence[str] | None = None, pin: str | None = None
) -> AsyncIterator[tuple[Node, ...]]:
    """Yield the nodes of a world of ``size`` ranks in this process, over NCCL; they share ``devices``."""
    fabric = open_nccl_fabric()
    assert len(fabric.devices()) >= devices
    async with local_world(size, hosts=hosts, pin=pin) as nodes:
        for node in nodes:
            use_fabric(node.world._engine.table, fabric)  # noqa: SLF001  # before the first device array, as tests of the fake do
        yield nodes
