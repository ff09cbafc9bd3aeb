"""Conformance of communicators: many arrays in one operation."""

# ruff: noqa: B023 -- functions made in a loop are awaited within their iteration

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np

from asyncpar.collectives.arrays import Array
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import OperationMismatch
from asyncpar.testing.collective_worlds import (
    DTYPES,
    CommunicatorSuite,
    assert_same,
    combined,
    errors_on_all,
    noise,
    on_all,
    ranked,
    values,
)


class Bundles(CommunicatorSuite):
    """all_reduce_many."""

    async def test_all_reduce_many_takes_arrays_of_any_shape_layout_and_dtype(self) -> None:
        for size in self.sizes:
            async with self.connect(size) as communicators:
                for op in ("sum", "max"):
                    bundles = [_mixed(rank) for rank in range(size)]
                    expected = [combined(op, arrays) for arrays in zip(*map(_mixed, range(size)), strict=True)]
                    results = await on_all(communicators, lambda c: c.all_reduce_many(bundles[c.rank], op))
                    for rank, result in ranked(communicators, results):
                        assert all(mine is given for mine, given in zip(result, bundles[rank], strict=True))
                        for array, right in zip(result, expected, strict=True):
                            assert_same(array, right, f"{op}, {size} ranks, {array.dtype}")

    async def test_all_reduce_many_cuts_long_bundles_into_pieces(self) -> None:
        for size in (2, 3):
            async with self.connect(size) as communicators:
                for algorithm in communicators[0].algorithms("all_reduce"):
                    lengths = (5, 400_001, 0, 3, 1, 200_000, 77)
                    bundles = [[values(rank, length, np.float32) for length in lengths] for rank in range(size)]
                    expected = [sum(arrays) for arrays in zip(*bundles, strict=True)]
                    await on_all(communicators, lambda c: c.all_reduce_many(bundles[c.rank], algorithm=algorithm))
                    for communicator in communicators:
                        for array, right in zip(bundles[communicator.rank], expected, strict=True):
                            assert_same(array, right, algorithm)

    async def test_all_reduce_many_gives_all_ranks_the_same_bits_again_and_again(self) -> None:
        for size in self.sizes:
            async with self.connect(size) as communicators:
                for algorithm in communicators[0].algorithms("all_reduce"):

                    async def run(communicator: Communicator) -> list[bytes]:
                        arrays = np.split(noise(communicator.rank, 4099), [100, 1000, 1001, 3000])
                        reduced = await communicator.all_reduce_many(arrays, "mean", algorithm=algorithm)
                        return await communicator.all_gather_object(np.concatenate(reduced).tobytes(), wanted=bytes)

                    results = [*await on_all(communicators, run), *await on_all(communicators, run)]
                    assert len({bits for result in results for bits in result}) == 1

    async def test_all_reduce_many_of_nothing_is_nothing(self) -> None:
        async with self.connect(3) as communicators:
            assert await on_all(communicators, lambda c: c.all_reduce_many([])) == [[]] * len(communicators)
            empty = await on_all(communicators, lambda c: c.all_reduce_many([np.zeros((0, 3))], "prod"))
            assert [[array.shape for array in arrays] for arrays in empty] == [[(0, 3)]] * len(communicators)

    async def test_all_reduce_many_meets_by_key_in_any_order(self) -> None:
        async with self.connect(3) as communicators:

            async def run(communicator: Communicator) -> dict[str, list[float]]:
                names = ["a", "b", "c"]
                names = names[communicator.rank :] + names[: communicator.rank]
                numbers = {"a": 1.0, "b": 10.0, "c": 100.0}
                calls = [
                    communicator.all_reduce_many([np.full(3, numbers[name]), np.full(2, numbers[name])], key=name)
                    for name in names
                ]
                results = dict(zip(names, await asyncio.gather(*calls), strict=True))
                return {name: [float(array[-1]) for array in arrays] for name, arrays in results.items()}

            expected = {"a": [3.0] * 2, "b": [30.0] * 2, "c": [300.0] * 2}
            assert await on_all(communicators, run) == [expected] * len(communicators)

    async def test_all_reduce_many_of_other_shapes_is_a_mismatch_that_names_both(self) -> None:
        async with self.connect(2) as communicators:
            shapes = ([(2, 3), (4,)], [(3, 2), (4,)])

            async def run(communicator: Communicator) -> list[Array]:
                return await communicator.all_reduce_many(list(map(np.zeros, shapes[communicator.rank])))

            for error in await errors_on_all(communicators, run):
                assert isinstance(error, OperationMismatch)
                assert "rank 0 calls all_reduce_many(float64[2,3], float64[4], sum)" in str(error)
                assert "rank 1 calls all_reduce_many(float64[3,2], float64[4], sum)" in str(error)
            for result in await on_all(communicators, lambda c: c.all_reduce_many([np.ones(3)])):
                assert_same(result[0], 2.0)


def _mixed(rank: int) -> list[Array]:
    """Return arrays of every dtype, alternating with others that are hard to pack."""
    make = partial(values, rank)
    return [
        make((5, 3)),
        *(make(17, dtype) for dtype in DTYPES),
        make((6, 8)).T,
        make((0, 4), np.int32),
        make((6, 8))[::2, 1::3],
        make(()),
        make(40, np.float32)[::-3],
        np.asfortranarray(make((2, 3, 4), np.float32)),
        make((1, 1)),
    ]
