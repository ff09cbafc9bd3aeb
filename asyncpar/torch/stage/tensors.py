"""Arrays as tensors over the same memory: the way back from ``arrays``."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

from asyncpar.errors import UsageError

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def tensor_of(array: Any, name: str = "array") -> torch.Tensor:
    """Return a tensor over the memory of ``array``; a tensor is returned as it is, cut off from autograd.

    What torch cannot share is copied: read-only memory, steps backwards or between elements, foreign byte order.
    Raises ``UsageError`` for dtypes that torch does not have.
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
