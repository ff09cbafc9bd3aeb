"""Paths for tensors that are not in the CPU's memory: CUDA's is NCCL, where torch has it.

A group makes the path of a device when it first sees such a tensor, on all ranks alike, and hands the whole operation
over.  ``device_paths`` may be given others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from asyncpar.errors import UsageError
from asyncpar.torch.errors import as_torch
from asyncpar.torch.group_base import GroupBase

F = TypeVar("F", bound=Callable[..., Any])
MakePath = Callable[[dist.Store, int, int, timedelta], Any]
"""From a store, a rank, a size and a timeout to an object with the operations of ``torch.distributed.ProcessGroup``."""


def _nccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise UsageError(
            "NCCL, which would be its path, is not there (this torch was built without it, or sees no GPU)"
        )
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(dist.PrefixStore("nccl/", store), rank, size, options)


device_paths: dict[str, MakePath] = {"cuda": _nccl}
"""By type of device: how to make the path of a group."""


_NAMES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "recv_anysource": "recv",
}
"""What ``torch.distributed`` calls operations that its groups call otherwise."""

_LISTS = (list, tuple)  # list | tuple would be made anew in each call


def by_device(method: F) -> F:
    """Make an operation hand itself over to the path of the device that its first tensor is on."""
    name = method.__name__

    @functools.wraps(method)
    def routed(self: GroupBase, tensors: Any, *rest: Any, **more: Any) -> Any:
        first = tensors
        while isinstance(first, _LISTS) and first:
            first = first[0]
        if not isinstance(first, torch.Tensor) or first.is_cpu:
            return method(self, tensors, *rest, **more)
        return getattr(path_of(self, first.device, name), name)(tensors, *rest, **more)

    return cast("F", routed)


def path_of(group: GroupBase, device: torch.device, operation: str) -> Any:
    """Return the path of ``group`` for ``device``; raises ``UsageError`` saying what to do where there is none."""
    path = group.paths.get(device.type)
    if path is None:
        trouble = f"there is no path for {device.type}"
        make = device_paths.get(device.type)
        if make is not None:
            try:
                path = group.paths[device.type] = make(
                    group.get_group_store(), group.rank(), group.size(), timedelta(seconds=group.seconds)
                )
            except UsageError as error:
                trouble = str(error)
        if path is None:
            refusal = UsageError(
                f"expected tensors in the CPU's memory, got one on {device}: {trouble}; pass tensor.cpu(), or make a "
                "group of another backend for such tensors"
            )
            raise as_torch(refusal, _NAMES.get(operation, operation))
    return path
