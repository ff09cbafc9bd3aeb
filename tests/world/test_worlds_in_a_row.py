"""Worlds that follow each other in one process: each ends quickly, leaves nothing, and refuses what is kept of it."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import PeerLost, StaleGeneration, WorldRevoked
from asyncpar.net.transport.link import Link
from asyncpar.testing import local_world
from tests.soak import chosen
from tests.world.processes import process_world

ENDS = ("SIGKILL", "SIGSTOP")
RANKS = Path(__file__).with_name("successor_ranks.py")
WORLDS = chosen(6, soak=20)


def descriptors() -> Counter[str]:
    """Return how many open files of each kind this process has."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            found[os.readlink(f"/proc/self/fd/{name}").partition(":")[0]] += 1
        except FileNotFoundError:  # that of the listing
            continue
    return found


def segments() -> int:
    """Return how many pieces of shared memory of arenas this process has mapped."""
    return Path("/proc/self/maps").read_text().count("asyncpar-arena")


async def one_world(generation: int, transport: str | None) -> Communicator:
    """Use a world, revoke it while ranks wait, end it, and return what was kept of it."""
    async with local_world(3, transport=transport, generation=generation) as nodes, asyncio.timeout(50):
        sums = await asyncio.gather(*(node.world.all_reduce(np.ones(4)) for node in nodes))
        assert [float(x[0]) for x in sums] == [3.0] * 3
        waiting = [asyncio.ensure_future(node.world.all_reduce(np.ones(4))) for node in nodes[1:]]
        large = asyncio.ensure_future(nodes[1].world.send(np.ones(1 << 20), 2))
        await asyncio.sleep(0)
        nodes[0].world.revoke(f"the end of generation {generation}")
        for error in await asyncio.gather(*waiting, large, return_exceptions=True):
            assert isinstance(error, WorldRevoked)
            assert error.generation == generation
        await asyncio.gather(*(node.stop() for node in nodes))
        return nodes[1].world


@pytest.mark.parametrize("transport", ["tcp", "shm", None])
async def test_many_worlds_leave_nothing_and_their_communicators_are_stale(transport: str | None) -> None:
    first = await one_world(0, transport)
    await asyncio.sleep(0.05)
    gc.collect()
    tasks, threads, files = asyncio.all_tasks(), set(threading.enumerate()), descriptors()
    ended = [await one_world(generation, transport) for generation in range(1, WORLDS)]
    kept = [first, *ended]
    del first, ended
    await asyncio.sleep(0.05)
    gc.collect()
    assert asyncio.all_tasks() <= tasks
    assert set(threading.enumerate()) <= threads  # fewer, where one of an earlier test has ended meanwhile
    assert not descriptors() - files
    for generation, comm in enumerate(kept):
        with pytest.raises(StaleGeneration, match=f"generation {generation} of the world"):
            await comm.all_reduce(np.ones(4))
        with pytest.raises(StaleGeneration):
            await comm.recv(0)
        with pytest.raises(StaleGeneration):
            await comm.shrink()
        with pytest.raises(StaleGeneration):
            comm.subgroup((0, 1))
    del comm
    kept.clear()
    gc.collect()
    assert segments() == 0


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_the_end_of_a_revoked_world_does_not_wait_for_peers_that_do_not_answer(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, given_up = Link.close, list[int]()

    async def hang(link: Link) -> None:
        """Close as a link whose peer takes nothing any more: when it is given up."""
        try:
            await asyncio.Event().wait()
        finally:
            given_up.append(link.peer)
            await close(link)

    async with local_world(2, transport=transport) as nodes, asyncio.timeout(50):
        await asyncio.gather(*(node.world.barrier() for node in nodes))
        nodes[0].world.revoke("another world followed")
        with monkeypatch.context() as patch:
            patch.setattr(Link, "close", hang)
            await nodes[0].stop()
        assert given_up == [1]


@pytest.mark.parametrize(
    ("how", "transport"), chosen([("SIGKILL", "tcp"), ("SIGSTOP", None)], soak=list(product(ENDS, ["tcp", None])))
)
async def test_survivors_form_the_next_world_in_the_same_process(
    tmp_path: Path, transport: str | None, how: str
) -> None:
    async with process_world(3, RANKS, tmp_path, "1.0", transport=transport) as ranks, asyncio.timeout(40):
        for rank in ranks:
            assert await rank.next() == "ready"
        assert ranks[1].rendezvous is not None
        ranks[1].rendezvous.open(generation=1, world_size=2)
        ranks[1].process.send_signal(getattr(signal, how))
        for place, rank in enumerate((ranks[0], ranks[2])):
            told = await rank.next()
            assert (told["rank"], told["size"], told["sum"]) == (place, 2, 2.0)
            assert told["stale"] == "StaleGeneration"


@pytest.mark.parametrize("transport", ["tcp", "shm", None])
async def test_a_world_that_is_revoked_after_it_was_left_is_stale_here_and_nobody_else_hears(
    transport: str | None,
) -> None:
    async with local_world(3, transport=transport) as nodes:
        groups = [node.world.subgroup((0, 1)) for node in nodes[:2]]
        await asyncio.gather(*(node.world.barrier() for node in nodes))
        assert groups[0] is not None
        assert groups[1] is not None
        await asyncio.gather(*(group.all_reduce(np.ones(4)) for group in groups if group is not None))
        await nodes[2].stop()
        nodes[2].world.revoke("another world followed")
        await asyncio.gather(*(group.barrier() for group in groups if group is not None))
        await nodes[0].stop()
        nodes[0].world.revoke("another world followed")
        for comm in (nodes[0].world, groups[0], nodes[2].world):
            with pytest.raises(StaleGeneration, match="another world followed"):
                await comm.barrier()
        assert not nodes[1].world.is_revoked


async def test_after_a_loss_without_revocation_the_node_is_closed() -> None:
    async with local_world(2, transport="tcp") as nodes:
        await asyncio.gather(*(node.world.barrier() for node in nodes))
        await nodes[0].stop()
        with pytest.raises(PeerLost, match="this node is closed"):
            await nodes[0].world.barrier()


async def test_a_communicator_that_is_kept_of_a_world_that_ended_well_keeps_no_memory() -> None:
    async with local_world(2, transport="shm") as nodes:
        for _ in range(3):
            await asyncio.gather(*(node.world.all_reduce(np.ones(4)) for node in nodes))
        kept = [node.world for node in nodes]
    del nodes
    await asyncio.sleep(0.05)
    gc.collect()
    assert segments() == 0
    with pytest.raises(PeerLost, match="this node is closed"):
        await kept[0].barrier()
