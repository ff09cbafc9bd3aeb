"""Collectives along any dimension: all ranks get what numpy makes of the whole."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpar.collectives.arrays import Array
from asyncpar.core.config.slicing import ceil_chunks
from asyncpar.errors import OperationMismatch, PeerError, UsageError
from asyncpar.tensors import TensorCommunicator
from tests.tensors.worlds import (
    DTYPES,
    SIZES,
    draw_tensor,
    on_world,
    outcomes,
    scrambled,
    shapes_and_dims,
)

FEW = settings(max_examples=25, deadline=None)

LAYOUTS = st.integers(0, 2)


@FEW
@given(shapes_and_dims(), st.data(), st.sampled_from(DTYPES), LAYOUTS)
def test_all_gather_is_concatenate_along_any_dimension_of_uneven_tensors(
    case: tuple[tuple[int, ...], int], data: st.DataObject, dtype: Any, layout: int
) -> None:
    shape, dim = case
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    tensors = [draw_tensor((*shape[:dim], n, *shape[dim + 1 :]), n, dtype) for n in lengths]
    expected = np.concatenate(tensors, axis=dim)

    async def main(c: TensorCommunicator) -> Array:
        return await c.all_gather(scrambled(tensors[c.rank], layout), dim)

    for got in on_world(len(tensors), main):
        assert got.flags.c_contiguous
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, expected)


@FEW
@given(shapes_and_dims(), SIZES, st.sampled_from(DTYPES), LAYOUTS)
def test_reduce_scatter_parts_the_whole_sum_and_loses_no_remainder(
    case: tuple[tuple[int, ...], int], size: int, dtype: Any, layout: int
) -> None:
    shape, dim = case
    tensors = [draw_tensor(shape, rank, dtype) for rank in range(size)]
    total = sum(tensors[1:], start=tensors[0])

    async def main(c: TensorCommunicator) -> Array:
        return await c.reduce_scatter(scrambled(tensors[c.rank], layout), dim)

    parts = on_world(size, main)
    assert all(part.flags.c_contiguous for part in parts)
    for part, (start, end) in zip(parts, ceil_chunks(shape[dim], size), strict=True):
        np.testing.assert_array_equal(part, np.take(total, range(start, end), axis=dim))
    np.testing.assert_array_equal(np.concatenate(parts, axis=dim), total)


@FEW
@given(shapes_and_dims(), SIZES, LAYOUTS)
def test_all_reduce_leaves_the_sum_in_the_tensor_itself(
    case: tuple[tuple[int, ...], int], size: int, layout: int
) -> None:
    tensors = [draw_tensor(case[0], rank) for rank in range(size)]
    total = sum(tensors[1:], start=tensors[0].copy())

    async def main(c: TensorCommunicator) -> Array:
        own = scrambled(tensors[c.rank].copy(), layout)
        assert await c.all_reduce(own) is own
        return own

    for got in on_world(size, main):
        np.testing.assert_array_equal(got, total)


@FEW
@given(shapes_and_dims(), st.data(), LAYOUTS)
def test_broadcast_overwrites_the_tensor_with_that_of_the_root(
    case: tuple[tuple[int, ...], int], data: st.DataObject, layout: int
) -> None:
    size = data.draw(SIZES)
    root = data.draw(st.integers(0, size - 1))

    async def main(c: TensorCommunicator) -> Array:
        own = scrambled(draw_tensor(case[0], c.rank), layout)
        assert await c.broadcast(own, root) is own
        return own

    for got in on_world(size, main):
        np.testing.assert_array_equal(got, draw_tensor(case[0], root))


def test_other_reductions_than_the_sum() -> None:
    async def main(c: TensorCommunicator) -> tuple[list[float], list[float]]:
        part = await c.reduce_scatter(np.arange(4.0) * (c.rank + 1), op="mean")
        return part.tolist(), (await c.all_reduce(np.array([c.rank + 1.0]), "prod")).tolist()

    assert on_world(2, main) == [([0.0, 1.5], [2.0]), ([3.0, 4.5], [2.0])]


def test_calls_take_their_place_when_they_are_made_not_when_they_are_awaited() -> None:
    async def main(c: TensorCommunicator) -> tuple[Any, ...]:
        first, second = c.all_gather(np.array([c.rank])), c.all_gather(np.array([10 + c.rank]))
        if c.rank % 2:
            return tuple(got.tolist() for got in await asyncio.gather(first, second))
        return tuple(got.tolist() for got in reversed(await asyncio.gather(second, first)))

    assert on_world(3, main) == [([0, 1, 2], [10, 11, 12])] * 3


def test_a_tensor_is_received_in_the_shape_that_is_expected() -> None:
    async def main(c: TensorCommunicator) -> Any:
        if c.rank == 0:
            return await c.send(np.arange(6, dtype=np.float32).reshape(2, 3), 1, tag=3)
        return (await c.recv((2, 3), 0, tag=3)).tolist()

    assert on_world(2, main) == [None, [[0, 1, 2], [3, 4, 5]]]


@pytest.mark.parametrize(
    "wanted", [{"shape": (3, 2)}, {"shape": (2, 3), "dtype": np.float64}, {"shape": (2,)}, {"shape": ()}]
)
def test_a_tensor_of_another_shape_or_dtype_is_a_mismatch_on_both_ranks(wanted: dict[str, Any]) -> None:
    async def main(c: TensorCommunicator) -> Any:
        if c.rank == 0:
            return await c.send(np.zeros((2, 3), np.float32), 1)
        return await c.recv(src=0, **wanted)

    receiver = outcomes(2, main)[1]
    assert isinstance(receiver, OperationMismatch)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((2,), None), r"src: expected a rank 0\.\.1 of the group, got None"),
        (((2,), 2), r"source: expected a rank 0\.\.1 of the group, got 2"),
        (((-2,), 0), r"shape: expected lengths of 0 or more, got \(-2,\)"),
        ((5, 0), "shape: expected a sequence of lengths, got 5"),
    ],
)
def test_wrong_arguments_of_recv_raise_at_once(arguments: tuple[Any, Any], message: str) -> None:
    async def main(c: TensorCommunicator) -> None:
        if c.rank == 1:
            with pytest.raises(UsageError, match=message):
                await c.recv(*arguments)

    on_world(2, main)


def test_an_unknown_dtype_of_recv_raises_at_once() -> None:
    async def main(c: TensorCommunicator) -> None:
        with pytest.raises(UsageError, match="dtype: expected a dtype, got 'f99'"):
            await c.recv((2,), 1 - c.rank, dtype="f99")

    on_world(2, main)


def test_a_rank_that_never_comes_is_named() -> None:
    async def main(c: TensorCommunicator) -> Any:
        c.communicator.timeout = 5.0
        return None if c.rank == 1 else await c.all_reduce(np.ones(4))

    errors = outcomes(3, main)
    for error in (errors[0], errors[2]):
        with pytest.raises(PeerError, match="rank 1"):
            raise error
