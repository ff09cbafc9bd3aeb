"""Paths for tensors that are not in the CPU's memory: CUDA's is NCCL, where torch has it.

A group makes the path of a device when it first sees such a tensor, on all ranks alike, and hands the whole operation
over.  ``device_paths`` may be given others.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from asyncpar.errors import UsageError
from asyncpar.torch.group_base import GroupBase

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


def path_of(group: GroupBase, device: torch.device) -> Any:
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
            raise UsageError(
                f"expected tensors in the CPU's memory, got one on {device}: {trouble}; pass tensor.cpu(), or make a "
                "group of another backend for such tensors"
            )
    return path
