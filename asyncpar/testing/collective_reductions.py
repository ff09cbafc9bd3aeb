"""Conformance of communicators: operations that reduce."""

# ruff: noqa: B023 -- functions made in a loop are awaited within their iteration

from __future__ import annotations

import numpy as np

from asyncpar.collectives.arrays import Array, possible_operations
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.names import Name
from asyncpar.testing.collective_worlds import (
    DTYPES,
    CommunicatorSuite,
    assert_same,
    combined,
    noise,
    on_all,
    ranked,
    values,
)


class ReductionSuite(CommunicatorSuite):
    """all_reduce, reduce, reduce_scatter."""

    async def test_all_reduce_sums_in_place_by_every_algorithm(self) -> None:
        for size in self.sizes:
            async with self.connect(size) as communicators:
                for algorithm in communicators[0].algorithms("all_reduce"):
                    for count in (0, 1, size, 2 * size + 1, 1000):
                        arrays = [values(rank, count) for rank in range(size)]
                        expected = sum(arrays)
                        results = await on_all(
                            communicators, lambda c: c.all_reduce(arrays[c.rank], algorithm=algorithm)
                        )
                        for rank, result in ranked(communicators, results):
                            assert result is arrays[rank]
                            assert_same(result, expected, f"{algorithm}, {size} ranks, {count}")

    async def test_all_reduce_cuts_long_arrays_into_pieces(self) -> None:
        for size in (2, 3):
            async with self.connect(size) as communicators:
                for algorithm in communicators[0].algorithms("all_reduce"):
                    arrays = [values(rank, 350_001, np.float32) for rank in range(size)]
                    expected = sum(arrays)
                    for result in await on_all(
                        communicators, lambda c: c.all_reduce(arrays[c.rank], algorithm=algorithm)
                    ):
                        assert_same(result, expected, algorithm)

    async def test_every_dtype_has_every_operation_that_means_something(self) -> None:
        async with self.connect(3) as communicators:
            for dtype in DTYPES:
                for op in possible_operations(dtype):
                    arrays = [values(rank, 17, dtype) for rank in range(3)]
                    if op == "mean":
                        expected = combined("sum", arrays).astype(np.complex128) / 3
                    else:
                        expected = combined(op, arrays)
                    for result in await on_all(communicators, lambda c: c.all_reduce(arrays[c.rank], Name(op))):
                        assert result.dtype == dtype
                        np.testing.assert_allclose(
                            result.astype(np.complex128),
                            expected.astype(np.complex128),
                            rtol=1e-2,
                            err_msg=f"{op} {dtype}",
                        )

    async def test_bool_sums_and_multiplies_as_numpy_does(self) -> None:
        async with self.connect(3) as communicators:
            for op in ("sum", "prod", "min", "max", "band", "bor", "bxor"):
                arrays = [values(rank, 9).astype(bool) for rank in range(3)]
                expected = combined(op, arrays)
                for result in await on_all(communicators, lambda c: c.all_reduce(arrays[c.rank], Name(op))):
                    assert_same(result, expected, op)

    async def test_all_ranks_get_the_same_bits_and_get_them_again(self) -> None:
        for size in self.sizes:
            async with self.connect(size) as communicators:
                for algorithm in communicators[0].algorithms("all_reduce"):

                    async def run(communicator: Communicator) -> list[bytes]:
                        array = noise(communicator.rank, 4099)
                        reduced = await communicator.all_reduce(array, algorithm=algorithm)
                        return await communicator.all_gather_object(bytes(reduced.data), wanted=bytes)

                    results = [*await on_all(communicators, run), *await on_all(communicators, run)]
                    assert len({bits for result in results for bits in result}) == 1

    async def test_mean_divides_once(self) -> None:
        async with self.connect(4) as communicators:
            expected = np.mean([noise(rank, 300_000) for rank in range(4)], axis=0)
            for result in await on_all(communicators, lambda c: c.all_reduce(noise(c.rank, 300_000), "mean")):
                np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
            parts = await on_all(communicators, lambda c: c.reduce_scatter(noise(c.rank, 300_000), "mean"))
            for rank, part in ranked(communicators, parts):
                np.testing.assert_allclose(part, expected[rank * 75_000 :][:75_000], rtol=1e-5, atol=1e-6)
            results = await on_all(communicators, lambda c: c.reduce(noise(c.rank, 300_000), "mean", root=2))
            for rank, at_root in ranked(communicators, results):
                assert (at_root is not None) == (rank == 2)
                if at_root is not None:
                    np.testing.assert_allclose(at_root, expected, rtol=1e-5, atol=1e-6)

    async def test_arrays_of_any_layout_are_reduced(self) -> None:
        async with self.connect(3) as communicators:
            for make in (_transposed, _strided, _scalar, _reversed):
                arrays = [make(values(rank, (6, 8))) for rank in range(3)]
                expected = sum(np.array(array) for array in arrays)
                for result in await on_all(communicators, lambda c: c.all_reduce(arrays[c.rank])):
                    assert_same(result, expected)

    async def test_out_takes_the_result_and_x_stays(self) -> None:
        async with self.connect(3) as communicators:
            kept = [values(rank, (4, 5)) for rank in range(3)]
            outs = [np.full((4, 5), -1.0) for _ in range(3)]
            results = await on_all(communicators, lambda c: c.all_reduce(kept[c.rank], out=outs[c.rank]))
            for rank, result in ranked(communicators, results):
                assert result is outs[rank]
                assert_same(result, sum(values(rank, (4, 5)) for rank in range(3)))
                assert_same(kept[rank], values(rank, (4, 5)))

    async def test_reduce_gives_the_root_the_sum_and_leaves_inputs_alone(self) -> None:
        for size in self.sizes:
            async with self.connect(size) as communicators:
                for algorithm in communicators[0].algorithms("reduce"):
                    for count, root in ((0, 0), (7, size - 1), (150_001, size // 2)):
                        arrays = [values(rank, count) for rank in range(size)]
                        results = await on_all(
                            communicators, lambda c: c.reduce(arrays[c.rank], root=root, algorithm=algorithm)
                        )
                        expected = combined("sum", [values(rank, count) for rank in range(size)])
                        for rank, result in ranked(communicators, results):
                            assert (result is not None) == (rank == root)
                            if result is not None:
                                assert_same(result, expected, f"{algorithm}, {size} ranks, {count}")
                        for rank, array in enumerate(arrays):
                            assert_same(array, values(rank, count))

    async def test_reduce_scatter_gives_ceil_slices_and_leaves_inputs_alone(self) -> None:
        for size in self.sizes:
            async with self.connect(size) as communicators:
                for algorithm in communicators[0].algorithms("reduce_scatter"):
                    for rows in (0, 1, size + 1, 40_000):
                        arrays = [values(rank, (rows, 3)) for rank in range(size)]
                        expected = combined("sum", arrays)
                        slices = await on_all(
                            communicators, lambda c: c.reduce_scatter(arrays[c.rank], algorithm=algorithm)
                        )
                        step = -(-rows // size)
                        for rank, mine in ranked(communicators, slices):
                            assert_same(
                                mine, expected[rank * step : (rank + 1) * step], f"{algorithm}, {size} ranks, {rows}"
                            )
                            assert_same(arrays[rank], values(rank, (rows, 3)))


def _transposed(array: Array) -> Array:
    return array.T


def _strided(array: Array) -> Array:
    return array[::2, 1::3]


def _scalar(array: Array) -> Array:
    return array[2, 3, np.newaxis].reshape(())


def _reversed(array: Array) -> Array:
    return array[::-1, ::-1]
