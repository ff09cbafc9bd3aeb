"""The sum of sparse tensors."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import numpy as np
import torch

from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import UsageError
from asyncpar.torch.arrays import array_of


def all_reduce_sparse(communicator: Communicator, tensor: torch.Tensor, op: str) -> Coroutine[Any, Any, None]:
    """Replace the COO tensor by the coalesced sum of those of all ranks, which may have different indices.

    The traffic grows with the elements that are there.  Raises ``UsageError`` for other layouts and operations.
    """
    if op != "sum":
        raise UsageError(f"op: expected SUM for sparse tensors, got {op}")
    if tensor.layout is not torch.sparse_coo:
        raise UsageError(f"tensor: expected a sparse tensor of layout torch.sparse_coo, got {tensor.layout}")
    own = tensor.detach().coalesce()
    places = np.ascontiguousarray(array_of(own.indices(), "indices").T)
    values = array_of(own.values(), "values")
    indices = communicator.all_gather_v(places)
    elements = communicator.all_gather_v(values)
    return _combine(tensor, indices, elements)


async def _combine(tensor: torch.Tensor, indices: Any, elements: Any) -> None:
    try:
        places = await indices
    except BaseException:
        elements.close()
        raise
    values = await elements
    with torch.sparse.check_sparse_tensor_invariants():  # others have sent the indices
        total = torch.sparse_coo_tensor(
            torch.from_numpy(np.ascontiguousarray(places.T)), _tensor(values, tensor.dtype), tensor.shape
        ).coalesce()
    with torch.no_grad():
        tensor.copy_(total)  # what detach() returns would get other indices, and this tensor not


def _tensor(values: Any, dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bfloat16:
        return torch.from_numpy(values.view(np.uint16)).view(dtype)
    return torch.from_numpy(values)
