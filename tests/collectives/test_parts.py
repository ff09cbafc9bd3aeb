"""``all_reduce.parts``: parts come as they are finished, are the result to the last bit, and end as all_reduce does."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, ClassVar

import numpy as np
import pytest

from asyncpar.blocking import Node
from asyncpar.collectives.arrays import Array
from asyncpar.collectives.communicator import Communicator
from asyncpar.collectives.parts import Part, PartStream
from asyncpar.errors import OperationMismatch, PeerCancelled, PeerLost, PeerTimeout, UsageError
from asyncpar.testing import local_world, run_virtual
from asyncpar.testing.blocking_world import blocking_world, run_ranks
from asyncpar.testing.collective_worlds import DTYPES, noise, on_all, values
from tests.collectives.conftest import OpenRanks

COUNT = 700_001
"""Elements that make several parts on every way, and do not divide evenly."""

LARGE = 16 * COUNT
"""Elements that are not through in one turn of the loop."""


async def listed(communicator: Communicator, x: Array, **options: Any) -> list[Part]:
    """Return the parts of the result, whose values are copied when they come, and then overwritten."""
    parts = []
    async for where, found in communicator.all_reduce.parts(x, **options):
        parts.append(Part(where, found.copy()))
        found[...] = 0
        await asyncio.sleep(0)
    return parts


def joined(parts: Sequence[Part], like: Array) -> Array:
    """Return what parts come to, each of which must come once."""
    result = np.empty(like.size, like.dtype)
    counted = np.zeros(like.size, np.uint8)
    for where, found in parts:
        result[where] = found
        counted[where] += 1
    assert (counted == 1).all()
    return result.reshape(like.shape)


class OverLanes:
    """The promises, in worlds of ``transport``."""

    transport: ClassVar[str]
    hosts: ClassVar[Sequence[str] | None] = None
    sizes: ClassVar[Sequence[int]] = (1, 2, 3)

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        async with local_world(size, transport=self.transport, hosts=self.hosts) as nodes:
            yield [node.world for node in nodes]

    async def test_they_are_the_result_of_every_algorithm_to_the_last_bit(self) -> None:
        for size in self.sizes:
            async with self.connect(size) as communicators:
                for algorithm in communicators[0].algorithms("all_reduce"):
                    for count in (0, 1, COUNT):
                        arrays = [noise(rank, count) for rank in range(size)]
                        options: dict[str, Any] = {"algorithm": algorithm, "op": "mean"}
                        wanted = await on_all(
                            communicators,
                            lambda c: c.all_reduce(arrays[c.rank].copy(), **options),  # noqa: B023
                        )
                        found = await on_all(communicators, lambda c: listed(c, arrays[c.rank], **options))  # noqa: B023
                        for parts in found:
                            assert joined(parts, wanted[0]).tobytes() == wanted[0].tobytes(), (algorithm, size, count)
                            assert len(parts) > 1 or count < COUNT

    async def test_parts_are_views_of_the_result(self) -> None:
        async with self.connect(2) as communicators:
            arrays = [values(rank, (7, COUNT // 7), np.float32) for rank in range(2)]
            expected = sum(arrays)

            async def run(communicator: Communicator) -> None:
                x = arrays[communicator.rank]
                async for where, found in communicator.all_reduce.parts(x):
                    assert np.shares_memory(found, x)
                    np.testing.assert_array_equal(x.reshape(-1)[where], found)

            await on_all(communicators, run)
            for x in arrays:
                np.testing.assert_array_equal(x, expected)

    async def test_every_dtype_and_layout_has_parts(self) -> None:
        async with self.connect(2) as communicators:
            for dtype in DTYPES:
                for make in (np.ascontiguousarray, np.asfortranarray, _strided):
                    arrays = [make(values(rank, (3, 401), dtype)) for rank in range(2)]
                    expected = arrays[0] + arrays[1]
                    outs = [np.empty_like(x) for x in arrays]
                    found = await on_all(
                        communicators,
                        lambda c: _kept(c, arrays[c.rank], out=outs[c.rank]),  # noqa: B023
                    )
                    for parts, out in zip(found, outs, strict=True):
                        np.testing.assert_array_equal(joined(parts, out), expected)
                        np.testing.assert_array_equal(out, expected)

    async def test_parts_in_memory_that_ranks_share_belong_to_their_reader(self) -> None:
        async with self.connect(2) as communicators:
            arrays = [communicator.empty(COUNT) for communicator in communicators]
            for rank, x in enumerate(arrays):
                x[...] = noise(rank, COUNT)
            expected = noise(0, COUNT) + noise(1, COUNT)
            for parts in await on_all(communicators, lambda c: listed(c, arrays[c.rank])):
                assert joined(parts, expected).tobytes() == expected.tobytes()

    async def test_some_ranks_may_want_parts_and_others_the_whole(self) -> None:
        async with self.connect(2) as communicators:

            async def run(communicator: Communicator) -> Array:
                x = noise(communicator.rank, COUNT)
                if communicator.rank:
                    return joined(await listed(communicator, x, key="k"), x)
                return await communicator.all_reduce(x, key="k")

            one, other = await on_all(communicators, run)
            assert one.tobytes() == other.tobytes()

    async def test_several_streams_and_operations_are_under_way_at_once(self) -> None:
        async with self.connect(2) as communicators:

            async def run(communicator: Communicator) -> list[float]:
                x, y, z = (np.full(COUNT, n, np.float32) for n in (1.0, 10.0, 100.0))
                streams = [communicator.all_reduce.parts(x), communicator.all_reduce.parts(y, key="y")]
                whole = communicator.all_reduce(z)
                read = (asyncio.ensure_future(_sum(stream)) for stream in reversed(streams))
                sums = await asyncio.gather(*read)
                return [*(total / COUNT for total in sums), float((await whole)[0])]

            assert await on_all(communicators, run) == [[20.0, 2.0, 200.0]] * 2

    async def test_leaving_early_cancels_and_the_group_goes_on(self) -> None:
        async with self.connect(2) as communicators:

            async def run(communicator: Communicator) -> float:
                x = np.ones(LARGE, np.float32)
                if communicator.rank == 0:
                    async with aclosing(communicator.all_reduce.parts(x)) as parts:
                        async for _ in parts:
                            break
                    assert [part async for part in parts] == []
                else:
                    with pytest.raises(PeerCancelled) as caught:
                        await listed(communicator, x)
                    assert caught.value.rank == communicator.ranks[0]
                return float((await communicator.all_reduce(np.ones(3)))[0])

            assert await on_all(communicators, run) == [2.0, 2.0]

    async def test_a_stream_that_is_dropped_cancels(self) -> None:
        async with self.connect(2) as communicators:

            async def run(communicator: Communicator) -> float:
                x = np.ones(LARGE, np.float32)
                if communicator.rank == 0:
                    await anext(communicator.all_reduce.parts(x))
                    gc.collect()
                else:
                    with pytest.raises(PeerCancelled):
                        await listed(communicator, x)
                return float((await communicator.all_reduce(np.ones(3)))[0])

            assert await on_all(communicators, run) == [2.0, 2.0]

    async def test_ranks_that_differ_all_raise(self) -> None:
        async with self.connect(2) as communicators:
            outcomes = await asyncio.gather(
                *(listed(c, np.ones(COUNT + c.rank, np.float32)) for c in communicators), return_exceptions=True
            )
            assert [type(outcome) for outcome in outcomes] == [OperationMismatch] * 2
            assert "700001" in str(outcomes[0])
            assert "700002" in str(outcomes[0])


class TestInproc(OverLanes):
    transport = "inproc"
    sizes = (1, 2, 3, 4)


class TestTcp(OverLanes):
    transport = "tcp"


class TestShm(OverLanes):
    transport = "shm"
    sizes = (1, 2, 4)


class TestTwoHosts(OverLanes):
    transport = "shm"
    hosts = ("a", "a", "b", "b")
    sizes = (4,)

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        """Groups of fewer ranks are of different hosts."""
        async with local_world(4, transport=None, hosts=self.hosts) as nodes:
            if size == 4:
                yield [node.world for node in nodes]
            else:
                made = [node.world.subgroup((1, 2)) for node in nodes]
                yield [group for group in made if group is not None]


def _strided(x: Array) -> Array:
    return np.repeat(x, 2, axis=1)[:, ::2]


async def _kept(communicator: Communicator, x: Array, **options: Any) -> list[Part]:
    return [part async for part in communicator.all_reduce.parts(x, **options)]


async def _sum(stream: PartStream) -> float:
    return float(sum([found.sum(dtype=np.float64) async for _, found in stream]))


# -- how it ends -------------------------------------------------------------------------------------------------------


def test_a_wrong_argument_is_refused_at_once_and_ends_on_all_ranks() -> None:
    async def main() -> None:
        async with local_world(2) as nodes:
            one, other = (node.world for node in nodes)
            for wrong in ({"op": "median"}, {"algorithm": "magic"}, {"out": np.ones(2)}):
                with pytest.raises(UsageError):
                    one.all_reduce.parts(np.ones(3), **wrong)
                with pytest.raises(PeerCancelled, match="refused"):
                    await listed(other, np.ones(3))
            with pytest.raises(UsageError, match="numpy array"):
                one.all_reduce.parts([1.0])  # type: ignore[type-var]
            with pytest.raises(PeerCancelled, match="refused"):
                await other.all_reduce(np.ones(1))

    run_virtual(main())


def test_a_timeout_names_who_is_missing() -> None:
    async def main() -> None:
        async with local_world(3) as nodes:
            for node in nodes:
                node.world.timeout = 5.0
            running = [asyncio.ensure_future(listed(node.world, np.ones(COUNT))) for node in nodes[:2]]
            for error in await asyncio.gather(*running, return_exceptions=True):
                assert isinstance(error, PeerTimeout | PeerCancelled)
                assert error.rank == 2

    run_virtual(main())


def test_a_deadline_cancels_the_operation_on_all_ranks() -> None:
    async def main() -> None:
        async with local_world(2) as nodes:
            one, other = (node.world for node in nodes)

            async def in_time() -> None:
                async with asyncio.timeout(2.0):
                    await listed(one, np.ones(3))

            with pytest.raises(TimeoutError):
                await in_time()
            with pytest.raises(PeerCancelled, match="rank 0 cancelled it"):
                await listed(other, np.ones(3))
            results = await on_all([one, other], lambda c: listed(c, np.ones(3)))
            assert all(parts[0].values.tolist() == [2.0] * 3 for parts in results)

    run_virtual(main())


async def test_a_rank_that_is_lost_meanwhile_is_named(open_ranks: OpenRanks) -> None:
    async with open_ranks(3) as ranks:
        await on_all(ranks.communicators, lambda c: c.all_reduce(np.ones(COUNT)))  # all are linked
        running = [asyncio.ensure_future(listed(c, np.ones(COUNT))) for c in ranks.communicators[:2]]
        await asyncio.sleep(0)
        ranks.kill(2)
        for error in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(error, PeerLost)
            assert error.rank == 2


async def test_parts_can_be_handed_to_a_function(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:

        async def run(communicator: Communicator) -> Array:
            x, parts = noise(communicator.rank, COUNT), list[Part]()
            await communicator.all_reduce.parts(x).each(parts.append)
            assert len(parts) > 1
            return joined(parts, x)

        one, other = await on_all(ranks.communicators, run)
        assert one.tobytes() == other.tobytes() == (noise(0, COUNT) + noise(1, COUNT)).tobytes()


async def test_a_stream_has_one_reader(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        stream = ranks.communicators[0].all_reduce.parts(np.ones(3))
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(UsageError, match="one reader"):
            await anext(stream)
        found = await listed(ranks.communicators[1], np.ones(3))
        assert (await reading).values.tolist() == found[0].values.tolist()


@pytest.mark.parametrize("ends", [lambda stream: stream.aclose(), lambda stream: asyncio.sleep(0)])
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
async def test_a_stream_that_is_never_read_gives_up_its_place(
    ends: Callable[[Any], Any], open_ranks: OpenRanks
) -> None:
    async with open_ranks(2) as ranks:
        one, other = ranks.communicators
        stream = one.all_reduce.parts(np.ones(3))
        await ends(stream)
        del stream
        gc.collect()
        with pytest.raises(PeerCancelled, match="never awaited"):
            await other.all_reduce(np.ones(3))
        results = await on_all([one, other], lambda c: c.all_reduce(np.ones(3)))
        assert results[0].tolist() == [2.0] * 3


def test_blocking_programs_iterate() -> None:
    def program(node: Node) -> list[float]:
        world = node.world
        x = np.full(COUNT, world.rank + 1.0, np.float32)
        sums = [float(part.values.sum(dtype=np.float64)) for part in world.all_reduce.parts(x, timeout=60.0)]
        assert len(sums) > 1
        if world.rank == 0:
            for _ in world.all_reduce.parts(np.ones(LARGE, np.float32)):
                break
        else:
            with pytest.raises(PeerCancelled):
                world.all_reduce(np.ones(LARGE, np.float32))
        return [sum(sums), float(world.all_reduce(np.ones(2))[0])]

    with blocking_world(2, transport=None) as nodes:
        assert run_ranks(nodes, program) == [[3.0 * COUNT, 2.0]] * 2


def test_blocking_parts_that_are_refused_or_not_read_give_up_their_place() -> None:
    def program(node: Node) -> float:
        world = node.world
        if world.rank == 0:
            with pytest.raises(UsageError, match="timeout"):
                world.all_reduce.parts(np.ones(3), timeout=-1.0)
            world.all_reduce.parts(np.ones(3)).close()
        else:
            for _ in range(2):
                with pytest.raises(PeerCancelled):
                    world.all_reduce(np.ones(3))
        return float(world.all_reduce(np.ones(2))[0])

    with blocking_world(2, transport=None) as nodes:
        assert run_ranks(nodes, program) == [2.0, 2.0]
