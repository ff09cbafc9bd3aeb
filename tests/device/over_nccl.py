"""Tests that ``scripts/test-gpu`` runs on real GPUs: the fabric over NCCL, by itself.

Two ranks of this process, each on a GPU of its own where there are two, else both on the only one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from asyncpar.device.fabric import DeviceError, NcclDtype, NcclOp, NcclResult
from asyncpar.device.nccl import NcclCommunicator, NcclFabric, open_nccl_fabric

RANKS = 2
COUNT = 1000
LIMIT = 60.0


@dataclass
class Rank:
    """A rank of a test, with memory and a stream."""

    fabric: NcclFabric
    communicator: NcclCommunicator
    stream: int
    memory: int
    pinned: int

    def put(self, values: np.ndarray[Any, Any]) -> None:
        self.fabric.pinned_view(self.pinned, values.nbytes)[:] = values.tobytes()
        self.fabric.copy(self.memory, self.pinned, values.nbytes, self.stream)

    def get(self, dtype: Any, count: int) -> np.ndarray[Any, Any]:
        nbytes = count * np.dtype(dtype).itemsize
        self.fabric.copy(self.pinned, self.memory, nbytes, self.stream)
        self.wait()
        return np.frombuffer(bytes(self.fabric.pinned_view(self.pinned, nbytes)), np.uint8).view(dtype)

    def wait(self) -> None:
        event = self.fabric.create_event(self.communicator.device)
        self.fabric.record_event(event, self.stream)
        until(lambda: self.fabric.query_event(event))
        self.fabric.destroy_event(event)


def until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not is_true():
        assert time.monotonic() < end, f"not within {LIMIT} s"


def complete(communicators: list[NcclCommunicator]) -> None:
    """Wait until all are there."""
    until(lambda: all(one.get_async_error() is not NcclResult.IN_PROGRESS for one in communicators))
    assert [one.get_async_error() for one in communicators] == [NcclResult.SUCCESS] * len(communicators)


@pytest.fixture(name="fabric", scope="module")
def open_fabric() -> NcclFabric:
    return open_nccl_fabric()


@pytest.fixture(name="ranks")
def open_ranks(fabric: NcclFabric) -> Iterator[list[Rank]]:
    devices = len(fabric.devices())
    unique = fabric.get_unique_id()
    made = [fabric.init_rank(RANKS, unique, rank, rank % devices) for rank in range(RANKS)]
    complete(made)
    ranks = [
        Rank(
            fabric,
            one,
            fabric.create_stream(one.device),
            fabric.allocate(RANKS * COUNT * 8, one.device),
            fabric.allocate_pinned(RANKS * COUNT * 8),
        )
        for one in made
    ]
    yield ranks
    for rank in ranks:
        rank.communicator.abort()
        fabric.destroy_stream(rank.stream)
        fabric.free(rank.memory, rank.communicator.device)
        fabric.free_pinned(rank.pinned)


@pytest.mark.parametrize("dtype", NcclDtype)
@pytest.mark.parametrize("op", NcclOp)
def test_every_dtype_is_reduced_by_every_operation(ranks: list[Rank], dtype: NcclDtype, op: NcclOp) -> None:
    kind = np.dtype(ml_dtypes.bfloat16) if dtype is NcclDtype.BFLOAT16 else np.dtype(dtype.value)
    inputs = [np.full(COUNT, 2 * rank + 2).astype(kind) for rank in range(RANKS)]
    for rank, values in zip(ranks, inputs, strict=True):
        rank.put(values)
    for rank in ranks:
        rank.communicator.all_reduce(rank.memory, rank.memory, COUNT, dtype, op, rank.stream)
    expected = {NcclOp.SUM: 6, NcclOp.PROD: 8, NcclOp.MIN: 2, NcclOp.MAX: 4, NcclOp.AVG: 3}[op]
    for rank in ranks:
        assert (rank.get(kind, COUNT) == np.asarray(expected).astype(kind)).all()


def test_ranks_send_to_each_other_in_a_group(ranks: list[Rank], fabric: NcclFabric) -> None:
    for number, rank in enumerate(ranks):
        rank.put(np.full(COUNT, number, np.float32))
        rank.wait()
    part = 4 * COUNT
    fabric.group_start()
    for number, rank in enumerate(ranks):
        peer = 1 - number
        rank.communicator.send(rank.memory, COUNT, NcclDtype.FLOAT32, peer, rank.stream)
        rank.communicator.recv(rank.memory + part, COUNT, NcclDtype.FLOAT32, peer, rank.stream)
    fabric.group_end()
    complete([rank.communicator for rank in ranks])
    for number, rank in enumerate(ranks):
        assert (rank.get(np.float32, 2 * COUNT)[COUNT:] == 1 - number).all()


def test_children_are_split_off_and_reduce(ranks: list[Rank]) -> None:
    children = [rank.communicator.split(0, -number) for number, rank in enumerate(ranks)]
    made = [child for child in children if child is not None]
    complete(made)
    assert [child.rank for child in made] == [1, 0]
    for rank, child in zip(ranks, made, strict=True):
        rank.put(np.ones(COUNT, np.float32))
        child.all_reduce(rank.memory, rank.memory, COUNT, NcclDtype.FLOAT32, NcclOp.SUM, rank.stream)
    for rank in ranks:
        assert (rank.get(np.float32, COUNT) == RANKS).all()
    for child in made:
        child.abort()


def test_the_survivor_of_a_lost_rank_shrinks_and_reduces_alone(ranks: list[Rank]) -> None:
    first = ranks[0]
    first.put(np.ones(COUNT, np.float32))
    first.communicator.all_reduce(first.memory, first.memory, COUNT, NcclDtype.FLOAT32, NcclOp.SUM, first.stream)
    alone = first.communicator.shrink([1], abort=True)
    complete([alone])
    assert (alone.rank, alone.size) == (0, 1)
    first.wait()
    first.put(np.full(COUNT, 5, np.float32))
    alone.all_reduce(first.memory, first.memory, COUNT, NcclDtype.FLOAT32, NcclOp.SUM, first.stream)
    assert (first.get(np.float32, COUNT) == 5).all()
    alone.abort()


def test_an_operation_that_waits_for_a_rank_ends_by_abort(ranks: list[Rank]) -> None:
    first = ranks[0]
    first.communicator.all_reduce(first.memory, first.memory, COUNT, NcclDtype.FLOAT32, NcclOp.SUM, first.stream)
    first.communicator.abort()
    first.wait()
    with pytest.raises(DeviceError, match="was aborted or destroyed"):
        first.communicator.all_reduce(first.memory, first.memory, 1, NcclDtype.FLOAT32, NcclOp.SUM, first.stream)
