"""The threads of the Gloo backend without Gloo: over pipes in memory."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from asyncpar.backends.gloo.channel import MESSAGE_BYTES, OPENING_BYTES, GlooChannel
from asyncpar.backends.message_lane import MessageLane
from asyncpar.errors import PeerLost
from asyncpar.testing.lanes import LaneConformance, LanePair, RecordingEvents


@dataclass
class MemoryWork:
    """Moves one piece once both ends have come."""

    memory: memoryview
    error: str | None = None
    is_over: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        self.is_over.wait()
        if self.error is not None:
            raise RuntimeError(self.error)


class ByteQueue:
    """One direction: pieces that are sent meet memory that is asked for, openings and rests apart."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: dict[bool, queue.SimpleQueue[MemoryWork]] = {kind: queue.SimpleQueue() for kind in (False, True)}
        self._asked: dict[bool, queue.SimpleQueue[MemoryWork]] = {kind: queue.SimpleQueue() for kind in (False, True)}
        self._broken: str | None = None

    def put(self, memory: memoryview, *, is_rest: bool, is_sent: bool) -> MemoryWork:
        work = MemoryWork(memory, self._broken)
        with self._lock:
            mine, others = (self._sent, self._asked) if is_sent else (self._asked, self._sent)
            if self._broken is not None:
                work.is_over.set()
            elif others[is_rest].empty():
                mine[is_rest].put(work)
            else:
                other = others[is_rest].get()
                source, target = (work, other) if is_sent else (other, work)
                target.memory[:] = source.memory
                work.is_over.set()
                other.is_over.set()
        return work

    def break_off(self, cause: str) -> None:
        with self._lock:
            self._broken = cause
            for waiting in (*self._sent.values(), *self._asked.values()):
                while not waiting.empty():
                    work = waiting.get()
                    work.error = cause
                    work.is_over.set()


@dataclass
class MemoryPipe:
    outward: ByteQueue
    inward: ByteQueue

    def send(self, piece: memoryview, *, is_rest: bool) -> MemoryWork:
        return self.outward.put(piece, is_rest=is_rest, is_sent=True)

    def receive(self, memory: memoryview, *, is_rest: bool) -> MemoryWork:
        return self.inward.put(memory, is_rest=is_rest, is_sent=False)


@asynccontextmanager
async def open_channels() -> AsyncIterator[tuple[list[GlooChannel], list[ByteQueue]]]:
    queues = [ByteQueue(), ByteQueue()]
    pipes = [MemoryPipe(*queues), MemoryPipe(*reversed(queues))]
    channels = [GlooChannel(pipe, name="test") for pipe in pipes]
    for channel in channels:
        channel.listen(meet=lambda: None, leave=lambda: None)
    try:
        yield channels, queues
    finally:
        for queue in queues:
            queue.break_off("the test is over")
        for channel in channels:
            channel.stop()
            channel.end()
            await asyncio.to_thread(channel.join, 5.0)


class TestLanes(LaneConformance):
    @asynccontextmanager
    async def connect(self) -> AsyncIterator[LanePair]:
        async with open_channels() as (channels, queues):
            lanes = [MessageLane(channel, kind="gloo") for channel in channels]

            async def sever() -> None:
                for queue in queues:
                    queue.break_off("the test cut it")

            yield LanePair(one=lanes[0], other=lanes[1], sever=sever)
            for lane in lanes:
                lane.abort(PeerLost("the test is over"))


async def test_a_length_that_cannot_be_is_a_loss() -> None:
    async with open_channels() as (channels, queues):
        events = RecordingEvents()
        MessageLane(channels[1], kind="gloo").start(events)
        opening = (MESSAGE_BYTES + 1).to_bytes(8, "little") + bytes(OPENING_BYTES - 8)
        queues[0].put(memoryview(opening), is_rest=False, is_sent=True)
        await events.until_lost()
        assert events.losses == [f"a message of {MESSAGE_BYTES + 1} bytes came"]


async def test_the_first_message_is_announced_once_if_nobody_has_opened_the_channel() -> None:
    queues = [ByteQueue(), ByteQueue()]
    channels = [GlooChannel(pipe, name="test") for pipe in (MemoryPipe(*queues), MemoryPipe(*reversed(queues)))]
    events: asyncio.Queue[str] = asyncio.Queue()
    channels[0].listen(meet=lambda: None, leave=lambda: None)
    channels[1].listen(meet=lambda: events.put_nowait("meet"), leave=lambda: events.put_nowait("leave"))
    for _ in range(2):
        channels[0].post([b"x"])
    assert await events.get() == "meet"
    channels[0].end()
    channels[1].end()
    for channel in channels:
        channel.stop()
        await asyncio.to_thread(channel.join, 5.0)
    await asyncio.sleep(0)
    assert events.empty()


async def test_a_peer_that_ends_at_once_has_left() -> None:
    queues = [ByteQueue(), ByteQueue()]
    channels = [GlooChannel(pipe, name="test") for pipe in (MemoryPipe(*queues), MemoryPipe(*reversed(queues)))]
    events: asyncio.Queue[str] = asyncio.Queue()
    channels[0].listen(meet=lambda: None, leave=lambda: None)
    channels[1].listen(meet=lambda: events.put_nowait("meet"), leave=lambda: events.put_nowait("leave"))
    channels[0].end()
    assert await events.get() == "leave"
    channels[1].end()
    for channel in channels:
        channel.stop()
        await asyncio.to_thread(channel.join, 5.0)
    assert events.empty()


async def test_an_error_while_sending_is_a_loss_although_nothing_comes() -> None:
    async with open_channels() as (channels, queues):
        events = RecordingEvents()
        lane = MessageLane(channels[0], kind="gloo")
        lane.start(events)
        queues[0].break_off("the link is down\nat pair.cc:1")  # the direction in which this side sends
        channels[0].post([b"x"])
        await events.until_lost()
        assert events.losses == ["the link is down"]
