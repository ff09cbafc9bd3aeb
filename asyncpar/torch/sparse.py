"""The sum of sparse tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import torch

from asyncpar.blocking.coroutines import After
from asyncpar.collectives.arrays import Array
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import UsageError
from asyncpar.torch.arrays import array_of
from asyncpar.torch.several import check_forms, form_bytes


def sparse_all_reduce(
    communicator: Communicator, tensor: torch.Tensor, op: str
) -> Callable[[], Coroutine[Any, Any, None]]:
    """Return what begins to replace the COO tensor by the coalesced sum of those of all ranks.

    They may have different indices; the traffic grows with the elements that are there.  Each travels as one row of
    bytes: what all must agree in, the indices, the values.  Raises ``UsageError`` for other layouts and operations.
    """
    if op != "sum":
        raise UsageError(f"op: expected SUM for sparse tensors, got {op}")
    if tensor.layout is not torch.sparse_coo:
        raise UsageError(f"tensor: expected a sparse tensor of layout torch.sparse_coo, got {tensor.layout}")
    own = tensor.detach().coalesce()
    places, values = array_of(own.indices(), "indices").T, array_of(own.values(), "values")
    form = form_bytes(str(tensor.dtype), tuple(tensor.shape), tensor.sparse_dim())
    rows = np.concatenate([np.broadcast_to(form, (len(places), form.size)), _bytes(places), _bytes(values)], axis=1)
    first, second = form.size, form.size + 8 * tensor.sparse_dim()

    def finish(found: Array) -> None:
        told = f"a rank of group {communicator.name} sums a sparse tensor of other shape or dtype than rank "
        check_forms(found[:, :first], form, f"{told}{communicator.rank}")
        indices = np.ascontiguousarray(found[:, first:second]).view(np.int64)
        elements = np.ascontiguousarray(found[:, second:]).view(values.dtype).reshape(-1, *values.shape[1:])
        _replace(tensor, indices, elements)

    return lambda: After(communicator.all_gather_v(rows), finish)


def _bytes(array: Array) -> Array:
    """Return the bytes of each row."""
    rows = np.ascontiguousarray(array).reshape(len(array), math.prod(array.shape[1:]))
    return rows.view(np.uint8)


def _replace(tensor: torch.Tensor, indices: Array, elements: Array) -> None:
    with torch.sparse.check_sparse_tensor_invariants():  # others have sent the indices
        total = torch.sparse_coo_tensor(
            torch.from_numpy(np.ascontiguousarray(indices.T)), _tensor(elements, tensor.dtype), tensor.shape
        ).coalesce()
    with torch.no_grad():
        tensor.copy_(total)  # what detach() returns would get other indices, and this tensor not


def _tensor(values: Array, dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bfloat16:
        return torch.from_numpy(values.view(np.uint16)).view(dtype)
    return torch.from_numpy(values)
