"""A peer whose frames are changed on their way, while ranks compute: a right result or a typed error, in time.

On virtual time.  Of the elements of an array any value is as good as another; see ``test_frames``, where every bit of
every frame is changed in front of one link.  Here worlds run, so few bits are, unless all is tested (``--soak``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.world import Member, World
from asyncpar.errors import AsyncparError, PeerLost, ProtocolError
from asyncpar.net.transport.inproc import InprocConnector, InprocFabric, InprocLane
from asyncpar.net.transport.lane import MAX_FRAME_BYTES, LaneEvents
from asyncpar.net.transport.links import Links
from asyncpar.net.wire.frame import HEADER_BYTES, FrameHeader, FrameKind, encode_header
from asyncpar.net.wire.reader import FrameReader
from asyncpar.testing import run_virtual
from tests.soak import chosen

TIMEOUT = 30.0
Change = Callable[[int, bytes], bytes]


class TamperedEvents:
    """Stands between a lane and its owner: the bytes of each frame go through ``change``, then through a reader."""

    def __init__(self, events: LaneEvents, change: Change) -> None:
        self._events = events
        self._change = change
        self._reader = FrameReader(events, max_length=MAX_FRAME_BYTES)
        self._payload = bytearray()
        self.frames: list[bytes] = []

    def lend(self, header: FrameHeader) -> memoryview:
        self._payload = bytearray(header.length)
        return memoryview(self._payload)

    def landed(self, header: FrameHeader) -> None:
        content = self._change(len(self.frames), encode_header(header) + self._payload)
        self.frames.append(content)
        self._reader.feed(content)

    def lost(self, cause: str) -> PeerLost:
        return self._events.lost(cause)


@asynccontextmanager
async def tampered_world(change: Change) -> AsyncIterator[tuple[list[Communicator], TamperedEvents]]:
    """Two ranks; what rank 1 says to rank 0 is changed."""
    fabric = InprocFabric()
    world = World(members=tuple(Member(rank=rank, host=f"h{rank}", host_id=f"h{rank}") for rank in range(2)))
    async with AsyncExitStack() as stack:
        links = []
        for rank in range(2):
            connector = InprocConnector(fabric)
            links.append(await stack.enter_async_context(Links(world=world, rank=rank, connector=connector)))
            fabric.join(links[-1])
        communicators = [Communicator.world(one, timeout=TIMEOUT) for one in links]
        await InprocConnector(fabric).connect(links[0], 1)
        lane = links[0].link(1).lane
        assert isinstance(lane, InprocLane)
        assert lane._events is not None  # noqa: SLF001  # the lane has no public way to change what arrives on it: the events between lane and link are replaced
        tampered = TamperedEvents(lane._events, change)  # noqa: SLF001  # the lane has no public way to change what arrives on it: the events between lane and link are replaced
        lane._events = tampered  # noqa: SLF001  # the lane has no public way to change what arrives on it: the events between lane and link are replaced
        yield communicators, tampered


async def reduce(communicator: Communicator) -> bool:
    """Is the sum right?"""
    array = np.full(4, communicator.rank + 1.0)
    await communicator.all_reduce(array)
    return bool((array == 3.0).all())


async def gather_objects(communicator: Communicator) -> bool:
    """Do all have what all gave?"""
    return await communicator.all_gather_object({"rank": communicator.rank}) == [{"rank": 0}, {"rank": 1}]


async def message(communicator: Communicator) -> bool:
    """Does a message arrive as it was sent?"""
    if communicator.rank == 1:
        await communicator.send(np.arange(6.0).reshape(2, 3), dest=0)
        return True
    return bool((await communicator.recv(source=1) == np.arange(6.0).reshape(2, 3)).all())


async def disagree(communicator: Communicator) -> bool:
    """Call what the other does not call: probes, descriptions and aborts travel."""
    array = np.zeros(4 + communicator.rank)
    await communicator.all_reduce(array)
    return False


JOBS = {job.__name__: job for job in (reduce, gather_objects, message, disagree)}


def outcome(name: str, change: Change) -> tuple[object, list[bytes], float]:
    """Run a job; return what rank 0 has of it, the frames that it was sent, and how long that took."""

    async def main() -> tuple[object, list[bytes], float]:
        loop = asyncio.get_running_loop()
        async with tampered_world(change) as (communicators, tampered):
            began = loop.time()
            calls = [asyncio.ensure_future(JOBS[name](communicator)) for communicator in communicators]
            done = (await asyncio.gather(*calls, return_exceptions=True))[0]
            return done, tampered.frames, loop.time() - began

    return run_virtual(main())


def unchanged(_: int, content: bytes) -> bytes:
    """Change nothing."""
    return content


def flip(frame: int, bit: int) -> Change:
    """Return the change of one bit in one frame."""

    def change(place: int, content: bytes) -> bytes:
        if place != frame or bit >= 8 * len(content):
            return content
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)

    return change


def _bits(first: int, end: int) -> range:
    """Return bits of the bytes ``first`` to ``end``: one of every three bytes, at all places in turn; or all bits."""
    return range(8 * first, 8 * end, chosen(23, soak=1))


def repeat(frame: int, times: int) -> Change:
    """Return the change that makes one frame come so many times."""
    return lambda place, content: content * (times if place == frame else 1)


@pytest.mark.parametrize("name", JOBS)
def test_a_change_of_any_bit_on_the_way_is_a_right_result_or_a_typed_error_in_time(name: str) -> None:
    done, frames, _ = outcome(name, unchanged)
    assert (done is True) == (name != "disagree")
    assert len(frames) >= 1
    for place, content in enumerate(frames):
        kind = FrameKind(content[3])
        is_array = kind is FrameKind.EAGER and name != "disagree"
        for bit in _bits(0, HEADER_BYTES if is_array else len(content)):
            done, _, seconds = outcome(name, flip(place, bit))
            assert done is True or isinstance(done, AsyncparError), (place, bit, done)
            assert seconds <= 3 * TIMEOUT


@pytest.mark.parametrize("name", ["gather_objects", "message"])
def test_a_change_of_any_bit_in_lengths_and_envelopes_is_a_typed_error_or_other_content(name: str) -> None:
    _, frames, _ = outcome(name, unchanged)
    for place, content in enumerate(frames):
        for bit in _bits(HEADER_BYTES, len(content)):
            done, _, seconds = outcome(name, flip(place, bit))
            assert isinstance(done, bool | AsyncparError), (place, bit, done)
            assert seconds <= 3 * TIMEOUT


@pytest.mark.parametrize("name", JOBS)
def test_frames_that_are_lost_or_come_twice_end_in_a_right_result_or_a_typed_error(name: str) -> None:
    _, frames, _ = outcome(name, unchanged)
    for lost in range(len(frames)):
        for times in (0, 2):
            done, _, seconds = outcome(name, repeat(lost, times))
            assert done is True or isinstance(done, AsyncparError), (lost, times, done)
            assert not isinstance(done, ProtocolError) or "two payloads" in str(done)
            assert seconds <= 3 * TIMEOUT
