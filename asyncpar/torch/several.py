"""Several tensors in one operation, which has one place in the order of the group, whether it is refused or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from asyncpar.blocking.coroutines import After
from asyncpar.collectives.arrays import Array
from asyncpar.collectives.communicator import Communicator
from asyncpar.collectives.keys import hash64
from asyncpar.errors import OperationMismatch
from asyncpar.torch.reduce_ops import Reduction

_FORM_BYTES = 8


def form_bytes(*parts: object) -> Array:
    """Return 8 bytes that tell values of different ``parts`` apart, for ranks whose calls must agree in them."""
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
    communicator: Communicator, arrays: Sequence[Array], reduction: Reduction, put: Callable[[Sequence[Array]], None]
) -> After:
    """Begin to combine each of ``arrays``, which stay as they are; ``put`` gets the results."""
    sums = [array.copy() for array in arrays]

    def finish(_: Any) -> None:
        put([reduction.divide(total, communicator.size) for total in sums])

    return After(communicator.all_reduce_many(sums, reduction.op), finish)
