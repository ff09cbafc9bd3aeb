"""Program of ``test_mpi.py``, under ``mpiexec``, all of it in every process: conformance over MPI, and the backend.

With one process all messages go from that process to itself, which MPI allows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar

import numpy as np
import pytest

from asyncpar.backends.message_lane import MessageLane
from asyncpar.backends.mpi.backend import load_mpi
from asyncpar.backends.mpi.progress import MpiProgress
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import PeerLost
from asyncpar.testing.collectives import CommunicatorConformance, on_all, ranked
from asyncpar.testing.lanes import LaneConformance, LanePair
from tests.backends.mpi_worlds import spread_world


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> None:
    """Look at nothing: MPI keeps its sockets until the process ends."""


class TestCommunicatorsOverMpi(CommunicatorConformance):
    sizes: ClassVar[Sequence[int]] = (1, 2, 3, 5)

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        async with spread_world(size) as communicators:
            yield communicators

    async def test_a_rank_that_leaves_early_does_not_disturb_the_others(self) -> None:
        async with self.connect(3) as communicators:

            async def run(communicator: Communicator) -> list[float]:
                await communicator.barrier()
                pair = communicator.subgroup([0, 1])
                if pair is None:
                    await communicator._engine.table.links.close()  # noqa: SLF001  # closes one rank's links under its communicator, as a failure would: no public call does
                    return []
                return [float((await pair.all_reduce(np.ones(60_000 * i + 1)))[-1]) for i in range(20)]

            for rank, result in ranked(communicators, await on_all(communicators, run)):
                assert result == ([] if rank == 2 else [2.0] * 20)


class TestLanesOverMpi(LaneConformance):
    @asynccontextmanager
    async def connect(self) -> AsyncIterator[LanePair]:
        mpi = load_mpi()
        communicators = [mpi.COMM_SELF.Dup() for _ in range(2)]
        engines = [MpiProgress(mpi, communicators, rank=rank, size=2) for rank in range(2)]
        lanes = [MessageLane(engine.channel(1 - rank), kind="mpi") for rank, engine in enumerate(engines)]
        for engine in engines:
            engine.open(meet=lambda _: None, leave=lambda _: None)

        async def sever() -> None:
            for engine in engines:
                engine.break_off("the test cut it")

        yield LanePair(one=lanes[0], other=lanes[1], sever=sever)
        over = PeerLost("the test is over")
        for lane in lanes:
            lane.abort(over)
        await asyncio.gather(*(engine.close() for engine in engines))
        if all(engine.is_through for engine in engines):
            for communicator in communicators:
                communicator.Free()
