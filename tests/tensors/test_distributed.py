"""Tensors in parts: whatever is done with the parts is what numpy does with the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpar.collectives.arrays import Array
from asyncpar.errors import UsageError
from asyncpar.tensors import DistributedTensor, TensorCommunicator, TensorPartition
from tests.tensors.worlds import DTYPES, SIZES, draw_tensor, on_world, scrambled, shapes_and_dims

FEW = settings(max_examples=25, deadline=None)

WHOLE = draw_tensor((5, 3), 0)


def sharded(c: TensorCommunicator, whole: Array, dim: int) -> DistributedTensor:
    return DistributedTensor.from_global(whole, dim, c.size, c.rank)


def part(rank: int, ends: Sequence[int], whole: Array, dim: int) -> DistributedTensor:
    """Return a part of any length: that of ``rank`` ends at ``ends[rank]``."""
    partition = TensorPartition(
        split_dim=dim,
        start_idx=0 if rank == 0 else ends[rank - 1],
        end_idx=ends[rank],
        num_partitions=len(ends),
        partition_rank=rank,
    )
    shard = partition.slice_of(whole.shape).cut(whole)
    return DistributedTensor(local_shard=shard, global_shape=whole.shape, partition=partition, device_id=rank)


def assert_is(got: Array, expected: Array) -> None:
    assert got.flags.c_contiguous
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)


@FEW
@given(shapes_and_dims(), SIZES, st.sampled_from(DTYPES), st.integers(0, 2))
def test_what_is_gathered_is_the_whole(case: tuple[tuple[int, ...], int], size: int, dtype: Any, layout: int) -> None:
    shape, dim = case
    whole = draw_tensor(shape, 1, dtype)
    for got in on_world(size, lambda c: sharded(c, scrambled(whole, layout), dim).gather(c)):
        assert_is(got, whole)


@FEW
@given(shapes_and_dims(), st.data())
def test_parts_of_any_lengths_are_gathered_and_redistributed(
    case: tuple[tuple[int, ...], int], data: st.DataObject
) -> None:
    shape, dim = case
    cuts = data.draw(st.lists(st.integers(0, shape[dim]), max_size=3))
    target = data.draw(st.integers(0, len(shape) - 1))
    ends, whole = [*sorted(cuts), shape[dim]], draw_tensor(shape, 2)

    async def main(c: TensorCommunicator) -> tuple[Array, DistributedTensor]:
        own = part(c.rank, ends, whole, dim)
        return await own.gather(c), await own.redistribute(target, c)

    for rank, (gathered, moved) in enumerate(on_world(len(ends), main)):
        assert_is(gathered, whole)
        assert_is(moved.local_shard, DistributedTensor.from_global(whole, target, len(ends), rank).local_shard)


@FEW
@given(shapes_and_dims(), st.data(), st.sampled_from(DTYPES))
def test_redistributed_parts_are_those_along_the_other_dimension(
    case: tuple[tuple[int, ...], int], data: st.DataObject, dtype: Any
) -> None:
    shape, dim = case
    size, target = data.draw(SIZES), data.draw(st.integers(0, len(shape) - 1))
    whole = draw_tensor(shape, 3, dtype)
    for rank, moved in enumerate(on_world(size, lambda c: sharded(c, whole, dim).redistribute(target, c))):
        expected = DistributedTensor.from_global(whole, target, size, rank)
        assert_is(moved.local_shard, expected.local_shard)
        assert (moved.global_shape, moved.partition) == (expected.global_shape, expected.partition)


def test_a_plain_communicator_will_do() -> None:
    async def main(c: TensorCommunicator) -> Array:
        moved = await sharded(c, WHOLE, 0).redistribute(1, c.communicator)
        return await moved.gather(c.communicator)

    for got in on_world(3, main):
        assert_is(got, WHOLE)


def test_redistributing_sends_only_what_the_others_will_have() -> None:
    async def main(c: TensorCommunicator) -> int:
        tensor = sharded(c, draw_tensor((400, 400), 0), 0)
        before = c.communicator.traffic.payload_bytes
        await tensor.redistribute(1, c)
        return c.communicator.traffic.payload_bytes - before

    share = 400 * 400 * 8 // 4
    for sent in on_world(4, main):
        assert share * 3 // 4 <= sent <= share * 3 // 4 + 2048


def test_a_replicated_tensor_is_whole_everywhere_and_can_be_split_again() -> None:
    async def main(c: TensorCommunicator) -> tuple[DistributedTensor, DistributedTensor, Array]:
        everywhere = await sharded(c, WHOLE, 0).replicate(c)
        return everywhere, await everywhere.redistribute(1, c), await everywhere.gather(c)

    for rank, (everywhere, again, gathered) in enumerate(on_world(3, main)):
        assert everywhere.is_replicated
        assert_is(everywhere.local_shard, WHOLE)
        assert_is(again.local_shard, WHOLE[:, rank : rank + 1])
        assert_is(gathered, WHOLE)


def test_what_is_gathered_is_a_copy_also_of_a_replicated_tensor() -> None:
    async def main(c: TensorCommunicator) -> bool:
        own = DistributedTensor.from_global(WHOLE, 0, 1, 0)
        return np.may_share_memory(await own.gather(c), own.local_shard)

    assert on_world(2, main) == [False, False]


def test_bfloat16_parts_stay_bfloat16() -> None:
    whole = draw_tensor((7, 3), 4, ml_dtypes.bfloat16)

    async def main(c: TensorCommunicator) -> tuple[Array, DistributedTensor]:
        own = sharded(c, whole, 0)
        return await own.gather(c), (await own.redistribute(1, c)).map(np.add, 1)

    for gathered, moved in on_world(3, main):
        assert_is(gathered, whole)
        assert moved.dtype == ml_dtypes.bfloat16


def test_the_slice_says_where_the_part_is_in_the_whole() -> None:
    again = np.zeros_like(WHOLE)
    for rank in range(4):
        tensor = DistributedTensor.from_global(WHOLE, 0, 4, rank)
        tensor.slice.put(tensor.local_shard, again)
    assert_is(again, WHOLE)


# -- elementwise ------------------------------------------------------------------------------------------------------

ELEMENTWISE: list[tuple[str, Callable[[Any, Any], Any]]] = [
    ("sum", lambda a, b: a + b),
    ("difference", lambda a, b: a - b),
    ("product", lambda a, b: a * b),
    ("quotient", lambda a, b: a / (b * b + 1)),
    ("negation", lambda a, b: -a),
    ("with a number", lambda a, b: a * 2 - 1),
]


@pytest.mark.parametrize("function", [case[1] for case in ELEMENTWISE], ids=[case[0] for case in ELEMENTWISE])
def test_arithmetic_on_parts_is_arithmetic_on_the_whole(function: Callable[[Any, Any], Any]) -> None:
    one, other = draw_tensor((5, 3), 5), draw_tensor((5, 3), 6)
    for rank in range(4):
        parts = [DistributedTensor.from_global(whole, 0, 4, rank) for whole in (one, other)]
        expected = DistributedTensor.from_global(function(one, other), 0, 4, rank)
        assert_is(function(*parts).local_shard, expected.local_shard)


def test_map_takes_any_elementwise_function() -> None:
    parts = [DistributedTensor.from_global(WHOLE, 1, 2, rank) for rank in range(2)]
    larger = [part.map(np.greater, 4).local_shard for part in parts]
    assert_is(np.concatenate(larger, axis=1), WHOLE > 4)


@pytest.mark.parametrize(
    "other",
    [
        DistributedTensor.from_global(WHOLE, 1, 4, 0),
        DistributedTensor.from_global(WHOLE, 0, 5, 0),
        DistributedTensor.from_global(WHOLE, 0, 4, 1),
        DistributedTensor.from_global(WHOLE.T, 0, 4, 0),
    ],
)
def test_tensors_that_are_split_otherwise_do_not_mix(other: DistributedTensor) -> None:
    with pytest.raises(UsageError, match=r"other: expected a tensor that is split as .*redistribute it first"):
        DistributedTensor.from_global(WHOLE, 0, 4, 0) + other


def test_a_whole_array_does_not_mix_with_a_part() -> None:
    with pytest.raises(UsageError, match="other: expected a number or a DistributedTensor, got ndarray"):
        DistributedTensor.from_global(WHOLE, 0, 4, 0).map(np.add, WHOLE[:2])  # type: ignore[arg-type]


def test_a_function_that_is_not_elementwise_is_refused() -> None:
    with pytest.raises(UsageError, match=r"local_shard: expected shape \(2, 3\), part 0\.\.2 along dimension 0"):
        DistributedTensor.from_global(WHOLE, 0, 4, 0).map(np.sum)


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"local_shard": WHOLE}, r"local_shard: expected shape \(2, 3\).* got \(5, 3\)"),
        ({"local_shard": [[1.0] * 3] * 2}, "local_shard: expected a numpy array, got list"),
        ({"local_shard": np.array([["a"] * 3] * 2)}, "local_shard: expected a numeric dtype"),
        ({"global_shape": (1, 3)}, "end_idx: expected at most 1, the length of dimension 0, got 2"),
        ({"global_shape": ()}, "Split dimension 0 out of bounds for tensor with 0 dimensions"),
        ({"global_shape": (5, -3)}, "global_shape: expected lengths of 0 or more"),
        ({"device_id": -1}, "device_id: expected 0 or more, got -1"),
    ],
)
def test_a_part_that_is_none_of_its_tensor_is_an_error(changes: dict[str, Any], message: str) -> None:
    good = {
        "local_shard": WHOLE[:2],
        "global_shape": (5, 3),
        "partition": TensorPartition.of((5, 3), 0, 4, 0),
        "device_id": 0,
    }
    with pytest.raises(UsageError, match=message):
        DistributedTensor(**{**good, **changes})


def test_a_part_tells_its_shape_and_whether_there_are_others() -> None:
    part = DistributedTensor.from_global(np.zeros((5, 3)), 0, 4, 2)
    assert (part.local_shape, part.requires_communication) == ((1, 3), True)
    whole = DistributedTensor.from_global(np.zeros((5, 3)), 0, 1, 0)
    assert (whole.local_shape, whole.requires_communication) == ((5, 3), False)
