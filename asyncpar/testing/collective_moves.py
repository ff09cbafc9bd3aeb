"""Conformance of communicators: operations that move arrays and values."""

# ruff: noqa: B023 -- functions made in a loop are awaited within their iteration

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from asyncpar.collectives.algorithms.catalog import known_algorithms
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.names import Name
from asyncpar.testing.collective_worlds import DTYPES, CommunicatorSuite, assert_same, on_all, ranked, values

_COUNTS = (0, 1, 10, 40_000)


class DataMovementSuite(CommunicatorSuite):
    """all_gather, gather, scatter, broadcast, all_to_all, barrier, and the forms for unequal parts and for objects."""

    async def test_all_gather_stacks_the_arrays_of_all_ranks(self) -> None:
        for size in self.sizes:
            async with self.connect(size) as communicators:
                for algorithm in communicators[0].algorithms("all_gather"):
                    for count in _COUNTS:
                        expected = np.stack([values(rank, count) for rank in range(size)])
                        results = await on_all(
                            communicators, lambda c: c.all_gather(values(c.rank, count), algorithm=algorithm)
                        )
                        for result in results:
                            assert_same(result, expected, f"{algorithm}, {size} ranks, {count}")

    async def test_all_gather_v_joins_unequal_parts(self) -> None:
        for size in self.sizes:
            async with self.connect(size) as communicators:
                for algorithm in (None, *map(Name, known_algorithms("all_gather"))):
                    expected = np.concatenate([values(rank, (rank * 3 % 5, 2)) for rank in range(size)])
                    results = await on_all(
                        communicators,
                        lambda c: c.all_gather_v(values(c.rank, (c.rank * 3 % 5, 2)), algorithm=algorithm),
                    )
                    for result in results:
                        assert_same(result, expected)

    async def test_broadcast_hands_out_the_array_of_the_root(self) -> None:
        for size in self.sizes:
            async with self.connect(size) as communicators:
                for algorithm in communicators[0].algorithms("broadcast"):
                    for count, root in ((0, 0), (9, size - 1), (200_001, size // 2)):
                        results = await on_all(
                            communicators,
                            lambda c: c.broadcast(values(c.rank, count), root=root, algorithm=algorithm),
                        )
                        for result in results:
                            assert_same(result, values(root, count), f"{algorithm}, {size} ranks")

    async def test_gather_and_scatter_are_each_others_inverse(self) -> None:
        for size in self.sizes:
            async with self.connect(size) as communicators:
                for algorithm in communicators[0].algorithms("gather"):
                    for count, root in ((0, 0), (5, size - 1), (60_000, size // 2)):

                        async def there_and_back(communicator: Communicator) -> Any:
                            x = values(communicator.rank, count)
                            everything = await communicator.gather(x, root=root, algorithm=algorithm)
                            if communicator.rank != root:
                                assert everything is None
                            back = await communicator.scatter(
                                everything,
                                root=root,
                                out=None if communicator.rank == root else np.empty_like(x),
                                algorithm=algorithm,
                            )
                            assert_same(back, x, f"{algorithm}, {size} ranks, {count}")
                            return everything

                        expected = np.stack([values(rank, count) for rank in range(size)])
                        for rank, everything in ranked(communicators, await on_all(communicators, there_and_back)):
                            if rank == root:
                                assert_same(everything, expected)

    async def test_all_to_all_transposes(self) -> None:
        for size in self.sizes:
            async with self.connect(size) as communicators:
                for algorithm in communicators[0].algorithms("all_to_all"):
                    for count in (0, 3, 33_000):
                        matrix = values(1, (size, size, count))
                        results = await on_all(
                            communicators, lambda c: c.all_to_all(matrix[c.rank], algorithm=algorithm)
                        )
                        for rank, result in ranked(communicators, results):
                            assert_same(result, matrix[:, rank], f"{algorithm}, {size} ranks")

    async def test_all_to_all_v_moves_unequal_parts(self) -> None:
        for size in self.sizes:
            async with self.connect(size) as communicators:
                counts = [[(source + 2 * dest) % 4 for dest in range(size)] for source in range(size)]
                rows = [values(source, (sum(counts[source]), 2)) for source in range(size)]
                results = await on_all(communicators, lambda c: c.all_to_all_v(rows[c.rank], counts[c.rank]))
                for dest, (received, sizes) in ranked(communicators, results):
                    assert sizes == [counts[source][dest] for source in range(size)]
                    starts = [sum(counts[source][:dest]) for source in range(size)]
                    parts = [rows[source][starts[source] :][: counts[source][dest]] for source in range(size)]
                    assert_same(received, np.concatenate(parts))

    async def test_every_dtype_can_be_moved(self) -> None:
        async with self.connect(3) as communicators:
            for dtype in (*DTYPES, np.dtype(bool)):
                for result in await on_all(communicators, lambda c: c.all_gather(values(c.rank, 5, dtype))):
                    assert_same(result, np.stack([values(rank, 5, dtype) for rank in range(3)]))

    async def test_arrays_of_any_layout_are_moved(self) -> None:
        async with self.connect(3) as communicators:
            outs = [np.zeros((4, 3, 5)).transpose(1, 0, 2) for _ in range(3)]
            results = await on_all(communicators, lambda c: c.all_gather(values(c.rank, (5, 4)).T, out=outs[c.rank]))
            for rank, result in ranked(communicators, results):
                assert result is outs[rank]
                assert_same(result, np.stack([values(rank, (5, 4)).T for rank in range(3)]))
            arrays = [values(rank, (6, 6))[::2, ::3] for rank in range(3)]
            for result in await on_all(communicators, lambda c: c.broadcast(arrays[c.rank], root=1)):
                assert_same(result, values(1, (6, 6))[::2, ::3])

    async def test_nobody_leaves_a_barrier_before_all_have_come(self) -> None:
        for size in self.sizes:
            async with self.connect(size) as communicators:
                for algorithm in communicators[0].algorithms("barrier"):
                    arrived: list[int] = []

                    async def meet(communicator: Communicator) -> int:
                        for _ in range(3 * communicator.rank):
                            await asyncio.sleep(0)
                        arrived.append(communicator.rank)
                        await communicator.barrier(algorithm=algorithm)
                        return len(arrived)

                    assert await on_all(communicators, meet) == [len(communicators)] * len(communicators)

    async def test_an_empty_array_still_synchronizes(self) -> None:
        async with self.connect(3) as communicators:
            arrived: list[int] = []

            async def meet(communicator: Communicator) -> int:
                for _ in range(5 * communicator.rank):
                    await asyncio.sleep(0)
                arrived.append(communicator.rank)
                await communicator.all_reduce(np.empty(0))
                return len(arrived)

            assert await on_all(communicators, meet) == [len(communicators)] * len(communicators)

    async def test_values_are_moved_in_their_object_forms(self) -> None:
        def value(rank: int) -> dict[str, Any]:
            return {"rank": rank, "names": ["a"] * rank, "array": values(rank, rank * 1000)}

        for size in self.sizes:
            async with self.connect(size) as communicators:
                root = size - 1
                for everything in await on_all(communicators, lambda c: c.all_gather_object(value(c.rank))):
                    for rank, one in enumerate(everything):
                        np.testing.assert_equal(one, value(rank))
                for one in await on_all(
                    communicators,
                    lambda c: c.broadcast_object(value(c.rank) if c.rank == root else None, root=root),
                ):
                    np.testing.assert_equal(one, value(root))
                collected = await on_all(communicators, lambda c: c.gather_object(value(c.rank), root=root))
                gathered = dict(ranked(communicators, collected))
                for rank, at_rank in gathered.items():
                    np.testing.assert_equal(at_rank, [value(r) for r in range(size)] if rank == root else None)
                scattered = await on_all(communicators, lambda c: c.scatter_object(gathered[c.rank], root=root))
                for rank, one in ranked(communicators, scattered):
                    np.testing.assert_equal(one, value(rank))
