"""The MPI backend without MPI: over a fake whose processes are all in this one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar

import numpy as np
import pytest

from asyncpar.backends.message_lane import MessageLane
from asyncpar.backends.mpi.backend import MpiWorld
from asyncpar.backends.mpi.channel import MESSAGE_BYTES
from asyncpar.backends.mpi.progress import MpiProgress
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import PeerLost, PeerTimeout
from asyncpar.node import Node, start_node
from asyncpar.testing.collectives import CommunicatorConformance
from asyncpar.testing.lanes import LaneConformance, LanePair
from tests.backends.fake_mpi import FakeMpi


@asynccontextmanager
async def open_world(size: int, *, processes: int) -> AsyncIterator[tuple[list[Node], list[MpiWorld]]]:
    mpi, everyone = FakeMpi(), FakeMpi.processes(processes)
    worlds = await asyncio.gather(*(MpiWorld.open(mpi, each, size=size, timeout=5.0) for each in everyone))
    attaches = [worlds[rank % processes].attach(rank) for rank in range(size)]
    nodes = await asyncio.gather(*(start_node(attach) for attach in attaches))
    try:
        yield list(nodes), list(worlds)
    finally:
        await asyncio.gather(*(node.stop() for node in nodes))
        for world in worlds:
            world.free()


@pytest.fixture
def engines_close_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines give up early as they close: the other side never ends."""
    monkeypatch.setattr("asyncpar.backends.mpi.progress.CLOSE_SECONDS", 0.02)


@pytest.fixture
def all_close_in_vain(engines_close_in_vain: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let lanes give up early, too."""
    monkeypatch.setattr("asyncpar.backends.message_lane.FLUSH_SECONDS", 0.02)


async def until_lost(node: Node, rank: int) -> None:
    lost = asyncio.Event()
    node.links.add_loss_listener(lambda gone, _: lost.set() if gone == rank else None)
    if rank not in node.links.lost:
        await lost.wait()


class TestCommunicators(CommunicatorConformance):
    sizes: ClassVar[Sequence[int]] = (3,)

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        async with open_world(size, processes=2) as (nodes, _):
            yield [node.world for node in nodes]


@pytest.mark.usefixtures("engines_close_in_vain")
class TestLanes(LaneConformance):
    large = 6 * 1024 * 1024

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[LanePair]:
        mpi = FakeMpi()
        engines = [
            MpiProgress(mpi, [everyone], rank=rank, size=2) for rank, everyone in enumerate(FakeMpi.processes(2))
        ]
        lanes = [MessageLane(engine.channel(1 - rank), kind="mpi") for rank, engine in enumerate(engines)]
        for engine in engines:
            engine.open(meet=lambda _: None, leave=lambda _: None)

        async def sever() -> None:
            for engine in engines:
                engine.break_off("the test cut it")

        yield LanePair(one=lanes[0], other=lanes[1], sever=sever)
        for lane in lanes:
            lane.abort(PeerLost("the test is over"))
        await asyncio.gather(*(engine.close() for engine in engines))


@pytest.mark.usefixtures("all_close_in_vain")
async def test_a_failure_of_mpi_ends_operations_with_its_message() -> None:
    async with open_world(2, processes=2) as (nodes, worlds):
        await asyncio.gather(*(node.world.barrier() for node in nodes))
        waiting = asyncio.ensure_future(nodes[0].world.all_reduce(np.ones(3)))
        await asyncio.sleep(0)
        worlds[0]._communicators[0].is_broken = True  # noqa: SLF001  # the MPI handle on which the progress loop polls: breaking it stands in for a failure of MPI
        with pytest.raises(PeerLost, match="rank 1 on here is lost: MPI failed: process failed"):
            await waiting
        worlds[0]._communicators[0].is_broken = False  # noqa: SLF001  # the MPI handle on which the progress loop polls: breaking it stands in for a failure of MPI


async def test_a_rank_that_left_before_anybody_linked_to_it_has_left() -> None:
    async with open_world(2, processes=2) as (nodes, _):
        leaving = asyncio.ensure_future(nodes[1].stop())
        await until_lost(nodes[0], 1)
        with pytest.raises(PeerLost, match="it left the world"):
            await nodes[0].world.barrier()
        await nodes[0].stop()
        await leaving


async def test_processes_that_do_not_come_are_a_timeout() -> None:
    with pytest.raises(PeerTimeout, match=r"mpi: waited 0.01 s for all processes to open the backend"):
        await MpiWorld.open(FakeMpi(), FakeMpi.processes(2)[0], timeout=0.01)


@pytest.mark.usefixtures("all_close_in_vain")
async def test_a_message_that_cannot_be_ours_ends_the_links() -> None:
    async with open_world(2, processes=2) as (nodes, worlds):
        await asyncio.gather(*(node.world.barrier() for node in nodes))
        stray = bytes(MESSAGE_BYTES + 1)
        worlds[1]._communicators[0].Isend((memoryview(stray), None), 0, 0)  # noqa: SLF001  # sends past the lanes, on the handle on which messages travel, what no lane would send
        await until_lost(nodes[0], 1)
        assert f"a message of {MESSAGE_BYTES + 1} bytes came from rank 1 of 2" in str(nodes[0].links.lost[1])


@pytest.mark.usefixtures("all_close_in_vain")
async def test_memory_that_mpi_still_uses_is_kept() -> None:
    mpi, everyone = FakeMpi(), FakeMpi.processes(2)
    engine = MpiProgress(mpi, [everyone[0]], rank=0, size=2)
    engine.open(meet=lambda _: None, leave=lambda _: None)
    engine.channel(1).post([b"nobody receives this"])
    await engine.close()
    assert not engine.is_through
    [unfinished] = mpi.COMM_WORLD.kept
    assert [bytes(memory) for _, memory in unfinished] == [b"nobody receives this", b""]
