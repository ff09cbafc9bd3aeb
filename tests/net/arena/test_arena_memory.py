"""The arena as memory for messages: what one rank writes another reads, and wrong places are refused."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.errors import UsageError
from asyncpar.net.arena.arena import ArenaMemory
from asyncpar.net.transport.shared import LEAST_SHARED
from asyncpar.testing import local_world
from tests.net.arena.conftest import Ranks, Run

SIZE = 100_000


def test_what_one_rank_writes_another_reads(run: Run) -> None:
    async def main() -> None:
        arenas = await Ranks(2).form_all()
        one, other = (ArenaMemory(arena) for arena in arenas)
        allocated = one.allocate(SIZE)
        assert allocated is not None
        offset, memory = allocated
        memory[:] = b"x" * SIZE
        assert other.can_read(0)
        view = other.read(0, offset, SIZE)
        assert view == b"x" * SIZE
        assert view.readonly
        del memory, view, allocated
        gc.collect()
        assert not other.is_gone(0)
        arenas[0].close()
        assert other.is_gone(0)
        arenas[1].close()
        assert not other.can_read(0)
        assert other.is_gone(0)

    run(main())


def test_places_outside_of_a_heap_and_ranks_of_other_hosts_are_refused(run: Run) -> None:
    async def main() -> None:
        arenas = await Ranks(2).form_all()
        memory = ArenaMemory(arenas[0])
        for offset in (-1, arenas[1].segments[1].heap_bytes, 1 << 62):
            with pytest.raises(UsageError, match="heap array"):
                memory.read(1, offset, 1)
        assert not memory.can_read(7)
        assert memory.is_gone(7)
        for arena in arenas:
            arena.close()

    run(main())


def test_without_buffers_there_is_nothing_to_share(run: Run) -> None:
    async def main() -> None:
        arenas = await Ranks(2).form_all()
        arenas[0].forbid_buffers("the test says so")
        assert ArenaMemory(arenas[0]).allocate(SIZE) is None
        for arena in arenas:
            arena.close()

    run(main())


class Mirror(ap.Actor):
    @ap.endpoint
    async def turn(self, array: np.ndarray) -> np.ndarray:
        array += 1
        return array


async def test_arrays_of_actors_go_both_ways_through_the_arena() -> None:
    array = np.arange(2 * LEAST_SHARED, dtype=np.float32)
    async with local_world(2, transport="shm") as nodes:
        await nodes[1].spawn(Mirror, name="mirror")
        mirror = nodes[0].ref("mirror", rank=1, actor_class=Mirror)
        for turn in range(3):
            result = await mirror.turn(array + turn)
            assert np.array_equal(result, array + turn + 1)
            assert result.flags.writeable
        exchanges = [nodes[rank].links.link(1 - rank)._exchange for rank in (0, 1)]  # noqa: SLF001  # what went by shared memory is counted apart from other bytes only here
        for exchange in exchanges:
            assert exchange is not None
            assert exchange.exporter.bytes_sent >= 3 * array.nbytes
