"""Operations that pack several tensors, or a sparse one, into a single collective.

Each has one place in the order of the group, even if it is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import torch

from asyncpar.blocking.coroutines import After
from asyncpar.collectives.arrays import Array
from asyncpar.collectives.communicator import Communicator, agreeing
from asyncpar.collectives.ledger import hash64
from asyncpar.core.config.names import ReduceOp
from asyncpar.errors import UsageError
from asyncpar.torch.arrays import array_of, tensor_of

_SHOWN = 4
"""Tensors that are named; larger numbers are distinguished by a digest."""


def tensors_detail(tensors: Sequence[torch.Tensor]) -> str:
    """Return the dtypes and shapes of ``tensors``, on which ranks must agree."""
    forms = [f"{tensor.dtype}{[*tensor.shape]}".removeprefix("torch.").replace(" ", "") for tensor in tensors]
    more = [f"... {len(forms)} tensors, {hash64(forms):016x}"] if len(forms) > _SHOWN else []
    return ", ".join([*forms[:_SHOWN], *more])


def gather_several(
    communicator: Communicator, arrays: Sequence[Array], put: Callable[[Sequence[Array]], None]
) -> After:
    """Start collecting ``arrays``; ``put`` receives, for each of them, the array of those of all ranks.

    Ranks must agree on their dtypes and shapes: ``tensors_detail``.
    """
    flats = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
    size = communicator.size

    def finish(rows: Array) -> None:
        ends = np.cumsum([len(flat) for flat in flats])
        parts = [np.ascontiguousarray(part) for part in np.split(rows, ends, axis=1)[:-1]]
        put([part.view(array.dtype).reshape(size, *array.shape) for part, array in zip(parts, arrays, strict=True)])

    return After(communicator.all_gather(np.concatenate([np.empty(0, np.uint8), *flats])), finish)


def reduce_several(
    communicator: Communicator,
    arrays: Sequence[Array],
    op: ReduceOp,
    divide: Callable[[Array, int], Array],
    put: Callable[[Sequence[Array]], None],
) -> After:
    """Start combining ``arrays``, which are not changed; ``put`` receives the results after ``divide``.

    ``divide`` takes a result and the number of ranks.
    """
    sums = [array.copy() for array in arrays]

    def finish(_: Any) -> None:
        put([divide(total, communicator.size) for total in sums])

    return After(communicator.all_reduce_many(sums, op), finish)


def sparse_all_reduce(
    communicator: Communicator, tensor: torch.Tensor, op: ReduceOp
) -> Callable[[], Coroutine[Any, Any, None]]:
    """Return a function that starts replacing the COO tensor by the coalesced sum over all ranks.

    They may have different indices; the traffic grows with the number of elements.  Each element is sent as one row of
    bytes: the indices, the values.  Raises ``UsageError`` for other layouts and operations.
    """
    if op != "sum":
        raise UsageError(f"op: expected SUM for sparse tensors, got {op}")
    if tensor.layout is not torch.sparse_coo:
        raise UsageError(f"tensor: expected a sparse tensor of layout torch.sparse_coo, got {tensor.layout}")
    own = tensor.detach().coalesce()
    places, values = array_of(own.indices(), "indices").T, array_of(own.values(), "values")
    rows = np.concatenate([_bytes(places), _bytes(values)], axis=1)
    end = 8 * tensor.sparse_dim()
    detail = f"{tensors_detail([tensor])}, {tensor.sparse_dim()} sparse dimensions"

    def finish(found: Array) -> None:
        indices = np.ascontiguousarray(found[:, :end]).view(np.int64)
        elements = np.ascontiguousarray(found[:, end:]).view(values.dtype).reshape(-1, *values.shape[1:])
        _replace(tensor, indices, elements)

    return lambda: agreeing(communicator, detail, lambda: After(communicator.all_gather_v(rows), finish))


def _bytes(array: Array) -> Array:
    """Return the bytes of each row."""
    rows = np.ascontiguousarray(array).reshape(len(array), math.prod(array.shape[1:]))
    return rows.view(np.uint8)


def _replace(tensor: torch.Tensor, indices: Array, elements: Array) -> None:
    with torch.sparse.check_sparse_tensor_invariants():  # others have sent the indices
        total = torch.sparse_coo_tensor(
            torch.from_numpy(np.ascontiguousarray(indices.T)), tensor_of(elements), tensor.shape
        ).coalesce()
    with torch.no_grad():
        tensor.copy_(total)  # the result of detach() would get other indices, but not this tensor
