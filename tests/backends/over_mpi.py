"""What ``test_mpi.py`` runs under ``mpiexec``, every process all of it: conformance over MPI, and the backend.

With one process all messages go from that process to itself, which MPI allows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar

from asyncpar.backends.message_lane import MessageLane
from asyncpar.backends.mpi.backend import load_mpi
from asyncpar.backends.mpi.office import MpiOffice
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import PeerLost
from asyncpar.testing.collectives import CommunicatorConformance
from asyncpar.testing.lanes import LaneConformance, LanePair
from tests.backends.mpi_worlds import spread_world


class TestCommunicatorsOverMpi(CommunicatorConformance):
    sizes: ClassVar[Sequence[int]] = (1, 2, 3, 5)

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        async with spread_world(size) as communicators:
            yield communicators


class TestLanesOverMpi(LaneConformance):
    @asynccontextmanager
    async def connect(self) -> AsyncIterator[LanePair]:
        mpi = load_mpi()
        communicators = [mpi.COMM_SELF.Dup() for _ in range(2)]
        offices = [MpiOffice(mpi, communicators, rank=rank, size=2) for rank in range(2)]
        lanes = [MessageLane(office.courier(1 - rank), kind="mpi") for rank, office in enumerate(offices)]
        for office in offices:
            office.open(meet=lambda _: None, leave=lambda _: None)

        async def sever() -> None:
            for office in offices:
                office.break_off("the test cut it")

        yield LanePair(one=lanes[0], other=lanes[1], sever=sever)
        over = PeerLost("the test is over")
        for lane in lanes:
            lane.abort(over)
        await asyncio.gather(*(office.close() for office in offices))
        if all(office.is_through for office in offices):
            for communicator in communicators:
                communicator.Free()
