"""Operations that pack several tensors, or a sparse one, into a single collective.

Each has one place in the order of the group, whether it is refused or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import torch

from asyncpar.blocking.coroutines import After
from asyncpar.collectives.arrays import Array
from asyncpar.collectives.communicator import Communicator
from asyncpar.collectives.ledger import hash64
from asyncpar.errors import OperationMismatch, UsageError
from asyncpar.torch.arrays import array_of, tensor_of

_FORM_BYTES = 8


def form_bytes(*parts: object) -> Array:
    """Return a hash of ``parts``, 8 bytes, which ranks compare whose calls must agree in them."""
    return np.frombuffer(hash64(*parts).to_bytes(_FORM_BYTES, "little"), np.uint8)


def check_forms(found: Array, own: Array, told: str) -> None:
    """Raise ``OperationMismatch`` unless all rows of ``found``, which ranks have sent, are ``own``."""
    different = np.flatnonzero((found != own).any(axis=1))
    if len(different):
        raise OperationMismatch(told.format(row=int(different[0])))


def gather_several(
    communicator: Communicator, arrays: Sequence[Array], put: Callable[[Sequence[Array]], None]
) -> After:
    """Begin to collect ``arrays``; ``put`` gets, for each of them, the array of those of all ranks."""
    form = form_bytes([(array.dtype.str, array.dtype.name, array.shape) for array in arrays])
    flats = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
    rank, size = communicator.rank, communicator.size

    def finish(rows: Array) -> None:
        told = f"rank {{row}} of group {communicator.name} passes other tensors than rank {rank}"
        check_forms(rows[:, :_FORM_BYTES], form, told)
        ends = np.cumsum([_FORM_BYTES, *(len(flat) for flat in flats)])
        parts = [np.ascontiguousarray(part) for part in np.split(rows, ends, axis=1)[1:-1]]
        put([part.view(array.dtype).reshape(size, *array.shape) for part, array in zip(parts, arrays, strict=True)])

    return After(communicator.all_gather(np.concatenate([form, *flats])), finish)


def reduce_several(
    communicator: Communicator,
    arrays: Sequence[Array],
    op: str,
    divide: Callable[[Array, int], Array],
    put: Callable[[Sequence[Array]], None],
) -> After:
    """Begin to combine each of ``arrays``, which stay as they are; ``put`` gets what ``divide`` makes of the results.

    ``divide`` is given a result and the number of ranks.
    """
    sums = [array.copy() for array in arrays]

    def finish(_: Any) -> None:
        put([divide(total, communicator.size) for total in sums])

    return After(communicator.all_reduce_many(sums, op), finish)


def sparse_all_reduce(
    communicator: Communicator, tensor: torch.Tensor, op: str
) -> Callable[[], Coroutine[Any, Any, None]]:
    """Return a function that begins to replace the COO tensor by the coalesced sum of those of all ranks.

    They may have different indices; the traffic grows with the number of elements.  Each element is sent as one row of
    bytes: the hash of what ranks must agree in, the indices, the values.  Raises ``UsageError`` for other layouts and
    operations.
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
            torch.from_numpy(np.ascontiguousarray(indices.T)), tensor_of(elements), tensor.shape
        ).coalesce()
    with torch.no_grad():
        tensor.copy_(total)  # what detach() returns would get other indices, and this tensor not
