"""Operations that have no single NCCL call, as groups of calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from asyncpar.collectives.device.dtypes import NcclReduction
from asyncpar.device.arrays import DeviceArray
from asyncpar.device.fabric import DeviceCommunicator, Fabric, NcclDtype, NcclResult


class DevicePiece(NamedTuple):
    """``nbytes`` at ``address`` that go to rank ``peer`` of the communicator, or come from it."""

    peer: int
    address: int
    nbytes: int


def grouped(fabric: Fabric, calls: Sequence[Callable[[], NcclResult]]) -> NcclResult:
    """Run ``calls`` as one group of NCCL."""
    if not calls:
        return NcclResult.SUCCESS
    fabric.group_start()
    try:
        for call in calls:
            call()
    finally:
        result = fabric.group_end()
    return result


def exchange(
    fabric: Fabric, comm: DeviceCommunicator, sends: Sequence[DevicePiece], recvs: Sequence[DevicePiece], stream: int
) -> NcclResult:
    """Send and receive all pieces at once; a rank's pieces for itself are copied."""
    own = [piece for piece in sends if piece.peer == comm.rank]
    taken = [piece for piece in recvs if piece.peer == comm.rank]
    for source, target in zip(own, taken, strict=True):
        if source.nbytes and source.address != target.address:
            fabric.copy(target.address, source.address, source.nbytes, stream)
    byte = NcclDtype.UINT8
    calls = [
        *(partial(comm.send, piece.address, piece.nbytes, byte, piece.peer, stream) for piece in _others(comm, sends)),
        *(partial(comm.recv, piece.address, piece.nbytes, byte, piece.peer, stream) for piece in _others(comm, recvs)),
    ]
    return grouped(fabric, calls)


def _others(comm: DeviceCommunicator, pieces: Sequence[DevicePiece]) -> Iterator[DevicePiece]:
    return (piece for piece in pieces if piece.peer != comm.rank and piece.nbytes)


def reduce_slices(
    fabric: Fabric,
    comm: DeviceCommunicator,
    source: DeviceArray,
    target: DeviceArray,
    parts: Sequence[tuple[int, int]],
    how: NcclReduction,
    stream: int,
) -> NcclResult:
    """Combine ``source`` of all ranks and leave rows ``parts[r]`` on rank ``r``, in one call if they are equal."""
    dtype, op, factor, _ = how
    row = math.prod(source.shape[1:]) * factor
    step = math.prod(source.shape[1:]) * source.dtype.itemsize
    lengths = {high - low for low, high in parts}
    if len(lengths) == 1:
        return comm.reduce_scatter(source.pointer, target.pointer, lengths.pop() * row, dtype, op, stream)
    return grouped(
        fabric,
        [
            partial(
                comm.reduce, source.pointer + low * step, target.pointer, (high - low) * row, dtype, op, root, stream
            )
            for root, (low, high) in enumerate(parts)
            if high > low and row
        ],
    )
