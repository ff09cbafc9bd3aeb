"""Means of float16: none of them overflows on its way, on any path."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncpar.core.config.names import AllReduceAlgorithm
from asyncpar.testing.world import local_world
from tests.products import sampled

LARGE = 40_000.0
"""Twice this is more than a float16 holds."""

PATHS = [
    ("shm", None, None),
    ("inproc", "ring", None),
    ("inproc", "halving", None),
    ("inproc", "tree", None),
    ("inproc", "hierarchical", ["a", "a", "b", "b"]),
    ("tcp", None, None),
    (None, "hierarchical", ["a", "a", "b", "b"]),
]
SIZES = [1, 3000, 300_001]
Half = NDArray[np.float16]


def values(rank: int, count: int) -> Half:
    """Return what ``rank`` brings: large, infinite, tiny and ordinary elements."""
    x = np.full(count, LARGE, np.float16)
    x[1::5] = np.float16(rank)
    x[2::5] = np.float16(2.0**-20)
    x[3::5] = np.float16(-LARGE)
    return x


@pytest.mark.parametrize(
    ("transport", "algorithm", "hosts", "count", "ranks"),
    [
        (*path, count, ranks)
        for path, count, ranks in sampled(PATHS, SIZES, [2, 3], where=lambda path, _, ranks: not path[2] or ranks == 2)
    ],
)
async def test_no_mean_of_large_values_is_infinite(
    transport: str | None, algorithm: AllReduceAlgorithm | None, hosts: list[str] | None, count: int, ranks: int
) -> None:
    ranks = ranks if hosts is None else len(hosts)
    wanted = np.mean([values(rank, count).astype(np.float64) for rank in range(ranks)], axis=0)
    async with local_world(ranks, transport=transport, hosts=hosts) as nodes:
        worlds = [node.world for node in nodes]
        for _ in range(3):  # the first call of a kind and later ones may take different paths
            arrays = [values(rank, count) for rank in range(ranks)]
            await asyncio.gather(
                *(world.all_reduce(x, "mean", algorithm=algorithm) for world, x in zip(worlds, arrays, strict=True))
            )
            for array in arrays:
                assert array.tobytes() == arrays[0].tobytes()
                np.testing.assert_allclose(array, wanted, rtol=2e-3, atol=1e-6)


async def _each(worlds: list[Any], call: Any) -> list[Any]:
    return await asyncio.gather(*(call(world) for world in worlds))


@pytest.mark.parametrize("count", [8, 90_000])
@pytest.mark.parametrize("transport", ["shm", "inproc"])
async def test_every_operation_that_means_is_safe(transport: str, count: int) -> None:
    async with local_world(3, transport=transport) as nodes:
        worlds = [node.world for node in nodes]
        inputs = [values(rank, count) for rank in range(3)]
        kept = [x.copy() for x in inputs]
        wanted = np.mean([x.astype(np.float64) for x in inputs], axis=0)
        slices = await _each(worlds, lambda world: world.reduce_scatter(inputs[world.rank], "mean"))
        np.testing.assert_allclose(np.concatenate(slices), wanted, rtol=2e-3, atol=1e-6)
        reduced = await _each(worlds, lambda world: world.reduce(inputs[world.rank], "mean", root=1))
        np.testing.assert_allclose(reduced[1], wanted, rtol=2e-3, atol=1e-6)
        outs = [np.empty(count, np.float16) for _ in worlds]
        await _each(worlds, lambda world: world.all_reduce(inputs[world.rank], "mean", out=outs[world.rank]))
        np.testing.assert_allclose(outs[2], wanted, rtol=2e-3, atol=1e-6)
        assert all((x == before).all() for x, before in zip(inputs, kept, strict=True)), "inputs are not changed"
        many = [[values(world.rank, count), values(world.rank, 7), np.full(5, 2.0)] for world in worlds]
        await _each(worlds, lambda world: world.all_reduce_many(many[world.rank], "mean"))
        np.testing.assert_allclose(many[0][0], wanted, rtol=2e-3, atol=1e-6)
        np.testing.assert_allclose(many[0][1], wanted[:7], rtol=2e-3, atol=1e-6)
        assert (many[0][2] == 2.0).all()


async def test_an_input_in_shared_memory_is_read_scaled() -> None:
    async with local_world(2, transport="shm") as nodes:
        count = 400_000
        arrays = []
        for node in nodes:
            x = node.empty((count,), np.float16)
            x[...] = LARGE
            arrays.append(x)
        slices = await asyncio.gather(
            *(node.world.reduce_scatter(x, "mean") for node, x in zip(nodes, arrays, strict=True))
        )
        assert all((part == np.float16(LARGE)).all() for part in slices)
        await asyncio.gather(*(node.world.all_reduce(x, "mean") for node, x in zip(nodes, arrays, strict=True)))
        assert all((x == np.float16(LARGE)).all() for x in arrays)


async def test_a_strided_array_in_place_is_scaled_once() -> None:
    async with local_world(2, transport="shm") as nodes:
        arrays = [np.full((30_000, 2), LARGE, np.float16) for _ in nodes]
        await asyncio.gather(*(node.world.all_reduce(x[:, 0], "mean") for node, x in zip(nodes, arrays, strict=True)))
        assert all((x == np.float16(LARGE)).all() for x in arrays)
