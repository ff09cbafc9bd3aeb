"""A fault on one rank is a typed error on all, no rank hangs, and the group stays usable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from asyncpar.core.config.names import Name
from asyncpar.errors import OperationMismatch, PeerCancelled, UsageError
from asyncpar.tensors import DistributedTensor, TensorCommunicator, TensorPartition
from asyncpar.testing import local_world
from tests.tensors.worlds import outcomes

Call = Callable[[TensorCommunicator], Coroutine[Any, Any, Any]]

MATRIX = np.ones((4, 3))


def read_only() -> np.ndarray[Any, np.dtype[Any]]:
    array = np.ones((4, 3))
    array.flags.writeable = False
    return array


def sharded(rank: int, size: int = 3, dim: int = 0) -> DistributedTensor:
    return DistributedTensor.from_global(MATRIX, dim, size, rank)


def after(call: Call) -> Call:
    """Return the call, and behind it one that works: is the group usable?"""

    async def main(c: TensorCommunicator) -> Any:
        try:
            return await call(c)
        finally:
            assert (await c.all_gather(np.array([c.rank]))).tolist() == list(range(c.size))

    return main


WRONG: list[tuple[str, Call, Call, str]] = [
    (
        "dimension",
        lambda c: c.all_gather(np.ones((2, 2)), 1),
        lambda c: c.all_gather(np.ones((2, 2)), 3),
        "Split dimension 3 out of bounds for tensor with 2 dimensions",
    ),
    (
        "scalar",
        lambda c: c.all_gather(np.ones(2)),
        lambda c: c.all_gather(np.array(1.0)),
        "Split dimension 0 out of bounds for tensor with 0 dimensions",
    ),
    (
        "list",
        lambda c: c.all_reduce(np.ones(2)),
        lambda c: c.all_reduce([1.0, 1.0]),  # type: ignore[arg-type]
        "t: expected a numpy array, got list",
    ),
    (
        "text",
        lambda c: c.broadcast(np.ones(2)),
        lambda c: c.broadcast(np.array(["a", "b"])),
        "t: expected a numeric dtype",
    ),
    (
        "read-only",
        lambda c: c.all_reduce(MATRIX.copy()),
        lambda c: c.all_reduce(read_only()),
        "t: expected an array that can be written",
    ),
    (
        "operation",
        lambda c: c.reduce_scatter(np.ones(2)),
        lambda c: c.reduce_scatter(np.ones(2), op=Name("average")),
        "average",
    ),
    (
        "root",
        lambda c: c.broadcast(np.ones(2), 0),
        lambda c: c.broadcast(np.ones(2), 3),
        r"root: expected a rank 0\.\.2 of the group, got 3",
    ),
    (
        "place",
        lambda c: sharded(c.rank).gather(c),
        lambda c: sharded(2).gather(c),
        "partition_rank: expected 1, this rank's place in the communicator, got 2",
    ),
    (
        "parts",
        lambda c: sharded(c.rank).gather(c),
        lambda c: sharded(c.rank, size=2).gather(c),
        "communicator: expected 2 ranks, one per partition, got 3",
    ),
    (
        "new dimension",
        lambda c: sharded(c.rank).redistribute(1, c),
        lambda c: sharded(c.rank).redistribute(2, c),
        "Split dimension 2 out of bounds for tensor with 2 dimensions",
    ),
]


@pytest.mark.parametrize(("good", "bad", "text"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_the_culprit_gets_its_usage_error_and_the_others_hear_of_it(good: Call, bad: Call, text: str) -> None:
    errors = outcomes(3, lambda c: after(bad if c.rank == 1 else good)(c))
    with pytest.raises(UsageError, match=text):
        raise errors[1]
    for other in (errors[0], errors[2]):
        assert isinstance(other, PeerCancelled)
        assert other.rank == 1
        with pytest.raises(PeerCancelled, match=rf"rank 1 cannot take part: .*{text}"):
            raise other


DIFFERENT: list[tuple[str, Call, Call, str]] = [
    (
        "lengths elsewhere",
        lambda c: c.all_gather(np.ones((2, 3))),
        lambda c: c.all_gather(np.ones((2, 4))),
        r"rank 0 has all_gather float64\[\?, 3\] along dimension 0, rank 1 has all_gather float64\[\?, 4\] along",
    ),
    (
        "dimension of a square",
        lambda c: c.all_gather(np.ones((2, 2)), 0),
        lambda c: c.all_gather(np.ones((2, 2)), 1),
        r"along dimension 0, rank 1 has all_gather float64\[2, \?\] along dimension 1",
    ),
    (
        "dtype",
        lambda c: c.all_reduce(np.ones(2)),
        lambda c: c.all_reduce(np.ones(2, np.float32)),
        r"rank 0 has all_reduce sum float64\[2\], rank 1 has all_reduce sum float32\[2\]",
    ),
    (
        "shape of a sum",
        lambda c: c.reduce_scatter(np.ones((2, 3))),
        lambda c: c.reduce_scatter(np.ones((3, 2))),
        r"float64\[2, 3\] along dimension 0, rank 1 has reduce_scatter sum float64\[3, 2\]",
    ),
    (
        "operation",
        lambda c: c.all_reduce(np.ones(2)),
        lambda c: c.broadcast(np.ones(2)),
        r"rank 0 has all_reduce sum float64\[2\], rank 1 has broadcast float64\[2\] from rank 0 of the group",
    ),
    (
        "root",
        lambda c: c.broadcast(np.ones(2), 0),
        lambda c: c.broadcast(np.ones(2), 1),
        "from rank 0 of the group, rank 1 has broadcast .* from rank 1 of the group",
    ),
    (
        "partition",
        lambda c: sharded(c.rank).gather(c),
        lambda c: sharded(c.rank, dim=1).gather(c),
        "split along dimension 0, rank 1 has .* split along dimension 1",
    ),
    (
        "whole",
        lambda c: sharded(c.rank).gather(c),
        lambda c: sharded(0, size=1).gather(c),
        "split along dimension 0, rank 1 has .* held whole",
    ),
]


@pytest.mark.parametrize(
    ("one", "other", "text"), [case[1:] for case in DIFFERENT], ids=[case[0] for case in DIFFERENT]
)
def test_ranks_that_call_different_things_all_learn_who_calls_what(one: Call, other: Call, text: str) -> None:
    for error in outcomes(3, lambda c: after(other if c.rank == 1 else one)(c)):
        with pytest.raises(OperationMismatch, match=text):
            raise error


def test_parts_that_do_not_join_up_are_an_error_on_all_ranks() -> None:
    bounds = [(0, 2), (1, 3), (3, 4)]

    async def main(c: TensorCommunicator) -> Any:
        start, end = bounds[c.rank]
        partition = TensorPartition(split_dim=0, start_idx=start, end_idx=end, num_partitions=3, partition_rank=c.rank)
        shard = MATRIX[start:end]
        return await DistributedTensor(
            local_shard=shard, global_shape=MATRIX.shape, partition=partition, device_id=0
        ).gather(c)

    for error in outcomes(3, after(main)):
        with pytest.raises(UsageError, match=r"expected the part of rank 1 to begin at 2, got 1\.\.3"):
            raise error


def test_a_missing_end_is_an_error_on_all_ranks() -> None:
    async def main(c: TensorCommunicator) -> Any:
        partition = TensorPartition(
            split_dim=0, start_idx=c.rank, end_idx=c.rank + 1, num_partitions=3, partition_rank=c.rank
        )
        tensor = DistributedTensor(local_shard=MATRIX[:1], global_shape=MATRIX.shape, partition=partition, device_id=0)
        return await tensor.redistribute(1, c)

    for error in outcomes(3, after(main)):
        with pytest.raises(UsageError, match=r"expected parts up to 4, got parts up to 3 on ranks \[0, 1, 2\]"):
            raise error


def test_a_culprit_whose_peers_never_come_still_gets_its_own_error() -> None:
    async def main(c: TensorCommunicator) -> Any:
        c.communicator.timeout = 5.0
        return await c.all_gather(MATRIX, 7) if c.rank == 0 else None

    error = outcomes(2, main)[0]
    assert isinstance(error, UsageError)
    assert "could not be notified" in error.__notes__[0]


def test_a_cancelled_rank_does_not_keep_the_others_waiting() -> None:
    async def main(c: TensorCommunicator) -> Any:
        if c.rank == 2:
            async with asyncio.timeout(1.0):
                await asyncio.sleep(0.5)
                call = c.all_gather(MATRIX)
                asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)  # type: ignore[union-attr]
                await call
        return await c.all_gather(MATRIX)

    errors = outcomes(3, main)
    assert all(isinstance(error, PeerCancelled) for error in errors[:2])
    assert isinstance(errors[2], asyncio.CancelledError)


def test_a_call_that_is_closed_does_not_keep_the_others_waiting() -> None:
    async def main(c: TensorCommunicator) -> Any:
        call = c.all_reduce(np.ones(3))
        if c.rank == 1:
            return call.close()
        return await call

    errors = outcomes(3, main)
    assert errors[1] is None
    assert all(isinstance(error, PeerCancelled) for error in (errors[0], errors[2]))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("number", [0, 4, 7])
async def test_over_real_lanes_it_is_the_same(transport: str, number: int) -> None:
    _, good, bad, text = WRONG[number]
    async with local_world(3, transport=transport) as nodes, asyncio.timeout(30):
        ranks = [TensorCommunicator(node.world) for node in nodes]
        calls = (after(bad if c.rank == 1 else good)(c) for c in ranks)
        errors = await asyncio.gather(*calls, return_exceptions=True)
    with pytest.raises(UsageError, match=text):
        raise errors[1]
    assert all(isinstance(error, PeerCancelled) and error.rank == 1 for error in (errors[0], errors[2]))


def test_in_a_sub_group_ranks_are_called_by_their_numbers_in_the_world() -> None:
    async def main(c: TensorCommunicator) -> Any:
        group = c.communicator.subgroup([2, 0])
        return None if group is None else await TensorCommunicator(group).all_gather(MATRIX, 5 if c.rank == 2 else 0)

    errors = outcomes(3, main)
    with pytest.raises(PeerCancelled, match="rank 0: all_gather: rank 2 cannot take part: UsageError: Split") as caught:
        raise errors[0]
    assert caught.value.rank == 2
