"""Program of ``test_gloo.py``: conformance over Gloo's connections on loopback, all ranks in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar

import numpy as np
import pytest

from asyncpar.backends.gloo.backend import attach_gloo, load_torch, meet
from asyncpar.backends.gloo.progress import GlooProgress
from asyncpar.backends.message_lane import MessageLane
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import PeerLost
from asyncpar.node import start_node
from asyncpar.testing.collectives import CommunicatorConformance, on_all, ranked
from asyncpar.testing.lanes import LaneConformance, LanePair

PATIENCE_SECONDS = 30.0


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> None:
    """Look at nothing: Gloo cannot end a thread that receives, nor its sockets, before the process ends."""


class TestCommunicatorsOverGloo(CommunicatorConformance):
    sizes: ClassVar[Sequence[int]] = (1, 2, 3)

    @asynccontextmanager
    async def connect(self, size: int) -> AsyncIterator[Sequence[Communicator]]:
        torch, distributed = load_torch()
        store = distributed.HashStore()
        met = await asyncio.gather(
            *(
                asyncio.to_thread(meet, store, distributed, rank=rank, size=size, timeout=PATIENCE_SECONDS)
                for rank in range(size)
            )
        )
        nodes = await asyncio.gather(*(start_node(attach_gloo(torch, each, rank)) for rank, each in enumerate(met)))
        try:
            for node in nodes:
                node.world.timeout = PATIENCE_SECONDS
            yield [node.world for node in nodes]
        finally:
            await asyncio.gather(*(node.stop() for node in nodes))

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


class TestLanesOverGloo(LaneConformance):
    @asynccontextmanager
    async def connect(self) -> AsyncIterator[LanePair]:
        torch, distributed = load_torch()
        store = distributed.HashStore()
        met = await asyncio.gather(
            *(
                asyncio.to_thread(meet, store, distributed, rank=rank, size=2, timeout=PATIENCE_SECONDS)
                for rank in range(2)
            )
        )
        engines = [GlooProgress(torch, each.group, rank=rank, size=2) for rank, each in enumerate(met)]
        channels = [engine.channel(1 - rank) for rank, engine in enumerate(engines)]
        lanes = [MessageLane(channel, kind="gloo") for channel in channels]
        for engine in engines:
            engine.open(meet=lambda _: None, leave=lambda _: None)

        async def sever() -> None:
            for channel in channels:
                channel.break_off("the test cut it")

        yield LanePair(one=lanes[0], other=lanes[1], sever=sever)
        over = PeerLost("the test is over")
        for lane in lanes:
            lane.abort(over)
        await asyncio.gather(*(engine.close() for engine in engines))
