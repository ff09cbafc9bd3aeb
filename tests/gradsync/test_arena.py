"""The synchronizer where ranks share memory: buckets lie in the arena, which changes no bit of any result."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import ArenaFull, NonFiniteValue, PeerCancelled, UsageError
from asyncpar.gradsync import GradientBucketingConfig, GradientCompressionConfig, GradientSynchronizer
from asyncpar.gradsync.schemes import Pair, ShardedReduce
from asyncpar.net.arena.arena import Arena
from asyncpar.nn import Array
from asyncpar.node import Node
from asyncpar.testing.world import local_world
from tests.collective_engines import engine_of
from tests.gradsync.test_synchronizer import INT8, Model, make_synchronizer, on_all
from tests.products import in_turn
from tests.soak import chosen

LARGE = {"first": (300_000,), "second": (700, 500), "third": (90_001,), "fourth": (3,)}
"""Shapes whose buckets go in chunks, at once, and through the slots."""

BUCKETS = GradientBucketingConfig(bucket_size_mb=1.0)
WAITS = ["poll", "doorbell"]
COMPRESSIONS = pytest.mark.parametrize(
    ("wait", "compression"),
    in_turn(WAITS, [None, INT8]),
    ids=lambda value: value if isinstance(value, str) else value.codec if value else "none",
    indirect=["wait"],
)


@pytest.fixture(autouse=True, params=WAITS)
def wait(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCPAR_ARENA_WAIT", request.param)


@asynccontextmanager
async def arena_of(size: int) -> AsyncIterator[tuple[Node, ...]]:
    async with local_world(size, transport="shm") as nodes, asyncio.timeout(30):
        yield nodes
        hosts = [engine_of(node.world).table.arena for node in nodes]
        assert [host.driver.rescues for host in hosts if host is not None] == [0] * size


def arena_under(node: Node) -> Arena:
    host = engine_of(node.world).table.arena
    assert host is not None
    return host.arena


def heap_bytes(node: Node) -> int:
    """Memory that the buffers of a rank take."""
    gc.collect()
    segment = arena_under(node).segments[node.rank]
    return os.fstat(segment._descriptor).st_blocks * 512 - segment.control_bytes  # noqa: SLF001  # pages that the system has given to a segment are found by its descriptor alone


def shown_arrays(synchronizer: GradientSynchronizer) -> list[NDArray[Any]]:
    """What a synchronizer shows other ranks."""
    layout = synchronizer._layouts.layout  # noqa: SLF001  # where a synchronizer keeps what it shows other ranks is not public
    assert layout is not None
    arrays: list[NDArray[Any]] = []
    for scheme in layout.schemes:
        match scheme:
            case ShardedReduce():
                arrays += [scheme.outgoing, scheme.owned]
            case Pair():
                arrays += [scheme.outgoing]
            case _:
                arrays += [scheme.flat]
    return arrays


async def synchronize_twice(
    nodes: Sequence[Node], compression: GradientCompressionConfig | None
) -> list[dict[str, Array]]:
    async def main(node: Node) -> dict[str, Array]:
        synchronizer = make_synchronizer(node, bucketing=BUCKETS, compression=compression)
        model = Model(node.rank, shapes=LARGE)
        for step in range(2):
            model.fill(step)
            await synchronizer.synchronize_gradients(model)
        return model.gradients()

    return await on_all(nodes, main)


@COMPRESSIONS
async def test_buckets_lie_in_the_arena_and_go_through_it(compression: GradientCompressionConfig | None) -> None:
    async def main(node: Node) -> None:
        synchronizer = make_synchronizer(node, bucketing=BUCKETS, compression=compression)
        await synchronizer.synchronize_gradients(Model(node.rank, shapes=LARGE))
        arrays = shown_arrays(synchronizer)
        assert len(arrays) >= 3
        assert None not in [arena_under(node).locate(array) for array in arrays]
        arrays_only = [entry for entry in node.world.traffic.operations if entry.algorithm != "auto"]
        assert {entry.algorithm for entry in arrays_only} == {"arena"}

    async with arena_of(3) as nodes:
        await on_all(nodes, main)


@COMPRESSIONS
async def test_buckets_in_the_arena_give_the_bits_that_others_give(
    compression: GradientCompressionConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with arena_of(3) as nodes:
        placed = await synchronize_twice(nodes, compression)
    monkeypatch.setattr(Communicator, "empty", lambda _, shape, dtype: np.empty(shape, dtype))
    async with arena_of(3) as nodes:
        copied = await synchronize_twice(nodes, compression)
    for one in (*placed, *copied):
        for name, gradient in one.items():
            np.testing.assert_array_equal(gradient.view(np.uint8), placed[0][name].view(np.uint8))


@pytest.mark.parametrize(
    ("wait", "error"), in_turn(WAITS, [ArenaFull("arena: full"), UsageError("arena: no buffers")]), indirect=["wait"]
)
async def test_where_the_arena_has_no_room_buckets_lie_elsewhere(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Array:
        raise error

    async with arena_of(2) as nodes:
        expected = await synchronize_twice(nodes, None)
        for node in nodes:
            monkeypatch.setattr(arena_under(node), "empty", refuse)
        for one in await synchronize_twice(nodes, None):
            for name, gradient in one.items():
                np.testing.assert_array_equal(gradient, expected[0][name])


@COMPRESSIONS
async def test_memory_of_old_buckets_is_given_back(compression: GradientCompressionConfig | None) -> None:
    async def main(node: Node) -> None:
        synchronizer = make_synchronizer(node, bucketing=BUCKETS, compression=compression)
        used = []
        for count in (800_000, 1000, 500_000):
            await synchronizer.synchronize_gradients(Model(node.rank, shapes={f"only_{count}": (count,)}))
            used.append(heap_bytes(node))
            assert used[-1] >= sum(array.nbytes for array in shown_arrays(synchronizer))
        assert used[1] < used[2] < used[0]
        synchronizer.clear_buffers()
        assert heap_bytes(node) == 0

    async with arena_of(2) as nodes:
        await on_all(nodes, main)


async def test_old_buckets_make_room_before_new_ones_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(node: Node) -> list[int]:
        synchronizer = make_synchronizer(node)
        empty, used = node.world.empty, []

        def watched(*given: Any) -> NDArray[Any]:
            used.append(heap_bytes(node))
            return empty(*given)

        monkeypatch.setattr(node.world, "empty", watched)
        for count in (800_000, 900_000):
            await synchronizer.synchronize_gradients(Model(node.rank, shapes={f"only_{count}": (count,)}))
        return used

    async with arena_of(2) as nodes:
        assert await on_all(nodes, main) == [[0, 0]] * 2


EVERY_MOMENT = ((0, 1), (1, 4), (2, 9), (0, 16), (1, 30), (2, 50), (0, 80), (1, 120))
MOMENTS = chosen(EVERY_MOMENT[::2], soak=EVERY_MOMENT)
"""Who gives up, and after how many turns of the loop."""


@COMPRESSIONS
async def test_a_step_that_one_rank_gives_up_at_any_moment_spoils_nothing(
    compression: GradientCompressionConfig | None,
) -> None:
    """The others get the right mean or an error, and the next step is right again.

    Who gives up has either nothing changed or, where all ranks were through already, the mean, too.
    """

    async def step(node: Node, synchronizer: GradientSynchronizer, model: Model, *, gives_up_after: int | None) -> None:
        model.fill()
        before = model.gradients()
        task = asyncio.ensure_future(synchronizer.synchronize_gradients(model))
        if gives_up_after is not None:
            for _ in range(gives_up_after):
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait({task})
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            assert isinstance(error, PeerCancelled | NonFiniteValue | asyncio.CancelledError)
            is_through = task.cancelled() and any((model.gradients()[name] != before[name]).any() for name in before)
            for name, gradient in model.gradients().items():
                np.testing.assert_allclose(gradient, means[name] if is_through else before[name], atol=tolerance)
        elif gives_up_after is None:
            results.append(model.gradients())

    tolerance = 1e-6 if compression is None else 0.1
    results: list[dict[str, Array]] = []
    every = [Model(rank, shapes=LARGE).gradients() for rank in range(3)]
    means = {name: np.mean([gradients[name] for gradients in every], axis=0) for name in LARGE}
    async with arena_of(3) as nodes:
        synchronizers = [make_synchronizer(node, bucketing=BUCKETS, compression=compression) for node in nodes]
        models = [Model(node.rank, shapes=LARGE) for node in nodes]
        for victim, moment in MOMENTS:
            for culprit in (victim, None):
                results.clear()
                await asyncio.gather(
                    *(
                        step(node, one, model, gives_up_after=moment if node.rank == culprit else None)
                        for node, one, model in zip(nodes, synchronizers, models, strict=True)
                    )
                )
                for result in results:
                    for name, gradient in result.items():
                        np.testing.assert_allclose(gradient, means[name], atol=1e-6 if compression is None else 0.2)
            assert len(results) == 3
