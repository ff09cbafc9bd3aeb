"""Bytes that flow are progress, however slowly a message comes; when they stop, the timeout says how far it got."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.world import Member, World
from asyncpar.errors import PeerTimeout
from asyncpar.net.transport.inproc import InprocConnector, InprocFabric, InprocLane
from asyncpar.net.transport.lane import MAX_FRAME_BYTES, LaneEvents
from asyncpar.net.transport.links import Links
from asyncpar.net.wire.frame import FrameHeader, encode_header
from asyncpar.net.wire.reader import FrameReader
from asyncpar.testing import run_virtual

TIMEOUT = 5.0
PIECE, PAUSE = 1_000, 0.1
COUNT = 50_000  # float64: 40 s on the way


class SlowEvents:
    """Stands between a lane and its owner: bytes come in pieces, until ``stops_after`` of them have."""

    def __init__(self, events: LaneEvents, stops_after: int) -> None:
        self._events = events
        self._left = stops_after
        self._stream = bytearray()
        self._payload = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self.reader = FrameReader(events, max_length=MAX_FRAME_BYTES)

    def lend(self, header: FrameHeader) -> memoryview:
        self._payload = bytearray(header.length)
        return memoryview(self._payload)

    def landed(self, header: FrameHeader) -> None:
        self._stream += encode_header(header) + self._payload
        if self._timer is None:
            self._move()

    def lost(self, cause: str) -> Any:
        return self._events.lost(cause)

    def _move(self) -> None:
        piece = bytes(self._stream[: min(PIECE, self._left)])
        del self._stream[: len(piece)]
        self._left -= len(piece)
        if piece:
            self.reader.feed(piece)
        self._timer = asyncio.get_running_loop().call_later(PAUSE, self._move) if self._stream else None


@asynccontextmanager
async def slow_world(
    monkeypatch: pytest.MonkeyPatch, stops_after: int
) -> AsyncIterator[tuple[Communicator, Communicator]]:
    """Two ranks; what rank 1 says comes slowly to rank 0."""
    fabric = InprocFabric()
    world = World(members=tuple(Member(rank=rank, host=f"h{rank}", host_id=f"h{rank}") for rank in range(2)))
    async with AsyncExitStack() as stack:
        links = []
        for rank in range(2):
            links.append(
                await stack.enter_async_context(Links(world=world, rank=rank, connector=InprocConnector(fabric)))
            )
            fabric.join(links[-1])
        one, other = (Communicator.world(each, timeout=TIMEOUT) for each in links)
        await InprocConnector(fabric).connect(links[0], 1)
        lane = links[0].link(1).lane
        assert isinstance(lane, InprocLane)
        assert lane._events is not None  # noqa: SLF001  # the lane has no public way to delay what arrives on it: the events between lane and link are replaced
        slow = SlowEvents(lane._events, stops_after)  # noqa: SLF001  # the lane has no public way to delay what arrives on it: the events between lane and link are replaced
        lane._events = slow  # noqa: SLF001  # the lane has no public way to delay what arrives on it: the events between lane and link are replaced
        monkeypatch.setattr(InprocLane, "missing_bytes", property(lambda _: slow.reader.missing_bytes))
        yield one, other


def test_a_message_that_takes_longer_than_the_timeout_arrives_while_bytes_flow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> float:
        async with slow_world(monkeypatch, 1 << 30) as (one, other):
            got, given = np.zeros(COUNT), np.arange(float(COUNT))
            began = asyncio.get_running_loop().time()
            await asyncio.gather(one.broadcast(got, root=1), other.broadcast(given, root=1))
            assert (got == given).all()
            return asyncio.get_running_loop().time() - began

    assert run_virtual(main()) > 4 * TIMEOUT


def test_when_bytes_stop_the_timeout_says_how_many_came_and_how_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with slow_world(monkeypatch, 150_000) as (one, other):
            sending = asyncio.ensure_future(other.broadcast(np.arange(float(COUNT)), root=1))
            began = loop.time()
            with pytest.raises(PeerTimeout, match=r"\d+ of \d+ bytes came and 0 of 0 went in 2\d\.\d s, 0\.00\d+ MB/s"):
                await one.broadcast(np.zeros(COUNT), root=1)
            assert 15.0 + TIMEOUT <= loop.time() - began <= 15.0 + 2 * TIMEOUT
            await asyncio.wait({sending})
            sending.exception()

    run_virtual(main())
