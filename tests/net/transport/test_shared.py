"""Messages through shared memory: whole, in order, bounded, and only as agreed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from asyncpar.errors import PeerLost, ProtocolError, UsageError
from asyncpar.net.transport.link import Link
from asyncpar.net.transport.shared import CHUNK_BYTES, CHUNKS, LEAST_SHARED, Exporter, SharedMemory
from asyncpar.net.wire.frame import MESSAGE_GROUP, FrameKind, Key, Segments
from asyncpar.testing.lanes import pattern
from tests.net.transport.conversation import Judge
from tests.net.transport.pairs import open_unix_pair

LARGE = (CHUNKS + 3) * CHUNK_BYTES + 12_345
START = 4096


@dataclass
class Memory(SharedMemory):
    """The memory of two ranks, as ``rank`` sees it."""

    rank: int
    heaps: dict[int, bytearray]
    room: int = CHUNKS
    """Chunks that can be had."""
    is_readable: bool = True
    has_left: bool = False
    reads: list[tuple[int, int]] = field(default_factory=list)
    taken: int = 0
    """Chunks that were taken."""

    def allocate(self, size: int) -> tuple[int, memoryview] | None:
        if self.taken == self.room:
            return None
        start = START + self.taken * size
        self.taken += 1
        return start, memoryview(self.heaps[self.rank])[start : start + size]

    def can_read(self, rank: int) -> bool:
        return self.is_readable and rank in self.heaps

    def is_gone(self, rank: int) -> bool:
        return self.has_left

    def read(self, rank: int, offset: int, size: int) -> memoryview:
        if offset + size > len(self.heaps[rank]):
            raise UsageError("there is no such place")
        self.reads.append((offset, size))
        return memoryview(self.heaps[rank]).toreadonly()[offset : offset + size]


@dataclass
class Side:
    """One end of a link, with what it received."""

    link: Link
    memory: Memory
    received: list[bytes] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    losses: list[str] = field(default_factory=list)
    goodbye: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.received) < count:
                self.changed.clear()
                await self.changed.wait()


def make_side(rank: int, heaps: dict[int, bytearray]) -> Side:
    memory = Memory(rank, heaps)

    def lost(_: int, cause: str) -> PeerLost:
        side.losses.append(cause)
        side.changed.set()
        return PeerLost(cause, cause=cause)

    def deliver(payload: memoryview, release: object) -> None:
        assert callable(release)
        side.received.append(bytes(payload))
        side.changed.set()
        release()

    link = Link(
        peer=1 - rank,
        generation=0,
        referee=Judge(),
        on_control=lambda rank, header, payload: side.goodbye.set(),
        on_lost=lost,
        on_message=deliver,
        max_message_bytes=1 << 30,
        message_budget=64 << 20,
        shared=memory,
    )
    side = Side(link, memory)
    return side


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[Side, Side]]:
    heaps = {rank: bytearray(START + CHUNKS * CHUNK_BYTES) for rank in (0, 1)}
    one, other = make_side(0, heaps), make_side(1, heaps)
    async with open_unix_pair() as (here, there):
        one.link.attach(here)
        other.link.attach(there)
        yield one, other


async def test_large_messages_go_through_memory_and_small_ones_over_the_lane() -> None:
    async with linked() as (one, other):
        lane = one.link.lane
        assert lane is not None
        sending = one.link.send_message(memoryview(pattern(LARGE)))
        assert sending is not None
        one.link.send_message(memoryview(b"small"))
        one.link.send_message(memoryview(pattern(LEAST_SHARED - 1, 7)))
        await other.until(3)
        assert other.received == [pattern(LARGE), b"small", pattern(LEAST_SHARED - 1, 7)]
        assert sum(size for _, size in other.memory.reads) == LARGE
        assert lane.bytes_sent < LARGE
        assert one.link.bytes_sent > LARGE
        assert other.link.bytes_received > LARGE
        assert sending.done.done()


async def test_both_directions_and_many_messages_keep_their_order() -> None:
    async with linked() as (one, other):
        sizes = [LEAST_SHARED, 10, LARGE, LEAST_SHARED + 1, 0, LARGE]
        for place, size in enumerate(sizes):
            one.link.send_message(memoryview(pattern(size, place)))
            other.link.send_message(memoryview(pattern(size, place + 100)))
        await other.until(len(sizes))
        await one.until(len(sizes))
        assert other.received == [pattern(size, place) for place, size in enumerate(sizes)]
        assert one.received == [pattern(size, place + 100) for place, size in enumerate(sizes)]


async def test_segments_travel_like_everything_else() -> None:
    async with linked() as (one, other):
        parts = [pattern(size, place) for place, size in enumerate((100, LARGE, 7, LEAST_SHARED))]
        one.link.send_message(Segments(map(memoryview, parts)))
        await other.until(1)
        assert other.received == [b"".join(parts)]


@pytest.mark.parametrize("who", ["sender", "receiver"])
async def test_without_memory_to_share_the_lane_carries_them(who: str) -> None:
    async with linked() as (one, other):
        one.memory.room = 0 if who == "sender" else CHUNKS
        other.memory.is_readable = who != "receiver"
        one.link.send_message(memoryview(pattern(LARGE)))
        await other.until(1)
        assert other.received == [pattern(LARGE)]
        assert other.memory.reads == []


async def test_a_message_that_is_taken_back_before_it_began_never_comes() -> None:
    async with linked() as (one, other):
        buffer = bytearray(pattern(LARGE))
        sending = one.link.send_message(memoryview(buffer))
        assert sending is not None
        assert not sending.release()
        buffer[:] = bytes(LARGE)
        one.link.send_message(memoryview(b"next"))
        await other.until(1)
        assert other.received == [b"next"]


def test_a_message_that_has_begun_goes_out_as_it_was_and_later_ones_can_be_taken_back() -> None:
    async def scenario() -> None:
        heap = bytearray(START + CHUNKS * CHUNK_BYTES)
        announced: list[int] = []
        exporter = Exporter(Memory(0, {0: heap}), lambda kind, key, fingerprint, offset: announced.append(offset))
        assert exporter.is_ready()
        buffer, arrived = bytearray(pattern(LARGE)), bytearray()
        first = exporter.send(Key(MESSAGE_GROUP, 0, 0), memoryview(buffer))
        second = exporter.send(Key(MESSAGE_GROUP, 1, 0), memoryview(b"x" * 10))
        third = exporter.send(Key(MESSAGE_GROUP, 2, 0), memoryview(b"y" * 10))
        assert first is not None
        assert second is not None
        assert third is not None
        assert first.release()
        assert not second.release()
        buffer[:] = bytes(LARGE)
        while len(arrived) < LARGE + 10:
            offset = announced.pop(0)
            arrived += heap[offset : offset + min(CHUNK_BYTES, max(LARGE - len(arrived), 10))]
            exporter.freed(offset)
        assert arrived == pattern(LARGE) + b"y" * 10
        assert first.done.cancelled()
        assert second.done.cancelled()
        assert third.done.result() is None

    asyncio.run(scenario())


async def test_chunks_are_taken_when_none_is_free_and_only_so_many() -> None:
    memory, announced = Memory(0, {0: bytearray(START + CHUNKS * CHUNK_BYTES)}), list[int]()
    exporter = Exporter(memory, lambda kind, key, fingerprint, offset: announced.append(offset))
    assert exporter.is_ready()
    exporter.send(Key(MESSAGE_GROUP, 0, 0), memoryview(bytes(CHUNK_BYTES)))
    exporter.freed(announced.pop())
    exporter.send(Key(MESSAGE_GROUP, 1, 0), memoryview(bytes(CHUNK_BYTES)))
    assert memory.taken == 1
    exporter.send(Key(MESSAGE_GROUP, 2, 0), memoryview(bytes(LARGE)))
    assert memory.taken == CHUNKS
    assert len(set(announced)) == CHUNKS


async def test_one_chunk_is_enough_where_there_is_no_memory_for_more() -> None:
    async with linked() as (one, other):
        one.memory.room = 1
        one.link.send_message(memoryview(pattern(LARGE)))
        await other.until(1)
        assert other.received == [pattern(LARGE)]
        assert {offset for offset, _ in other.memory.reads} == {START}


async def test_the_loss_of_the_peer_ends_what_waits() -> None:
    heap = bytearray(START + CHUNKS * CHUNK_BYTES)
    exporter = Exporter(Memory(0, {0: heap}), lambda kind, key, fingerprint, offset: None)
    assert exporter.is_ready()
    sending = exporter.send(Key(MESSAGE_GROUP, 0, 0), memoryview(bytes(LARGE)))
    assert sending is not None
    exporter.fail(PeerLost("gone", cause="gone"))
    with pytest.raises(PeerLost, match="gone"):
        sending.done.result()
    assert not sending.release()


async def test_what_is_read_after_the_peer_has_left_is_no_message() -> None:
    async with linked() as (one, other):
        other.memory.has_left = True
        one.link.send_message(memoryview(pattern(LARGE)))
        one.link.control(FrameKind.GOODBYE, Key(0, 0, 0))
        async with asyncio.timeout(30):
            await other.goodbye.wait()
        assert other.received == []
        assert other.losses == []


async def test_chunks_that_were_not_sent_cannot_be_given_back() -> None:
    exporter = Exporter(Memory(0, {0: bytearray(START + CHUNKS * CHUNK_BYTES)}), lambda *_: None)
    with pytest.raises(ProtocolError, match="had not to read"):
        exporter.freed(START)
    assert exporter.is_ready()
    exporter.send(Key(MESSAGE_GROUP, 0, 0), memoryview(bytes(LARGE)))
    with pytest.raises(ProtocolError, match="had not to read"):
        exporter.freed(START + 1)


@pytest.mark.parametrize(
    ("kind", "key", "offset", "message"),
    [
        (FrameKind.CHUNK, Key(MESSAGE_GROUP, 5, 0), START, "without a grant"),
        (FrameKind.CHUNK, Key(9, 0, 0), START, "share no memory"),
        (FrameKind.FREED, Key(MESSAGE_GROUP, 0, 0), START, "had not to read"),
    ],
)
async def test_chunks_out_of_place_end_the_connection(kind: FrameKind, key: Key, offset: int, message: str) -> None:
    async with linked() as (one, other):
        one.link.control(kind, key, offset.to_bytes(8, "little"))
        async with asyncio.timeout(30):
            await other.changed.wait()
        assert message in other.losses[0]


async def test_chunks_outside_of_the_memory_end_the_connection() -> None:
    async with linked() as (one, other):
        one.memory.allocate = lambda size: (1 << 40, memoryview(bytearray(size)))  # type: ignore[method-assign]
        one.link.send_message(memoryview(bytes(LARGE)))
        async with asyncio.timeout(30):
            await other.changed.wait()
        assert "there is no such place" in other.losses[0]
        assert other.received == []


async def test_a_rank_that_shares_nothing_refuses_chunks() -> None:
    async with linked() as (one, other):
        other.link._exchange = None  # noqa: SLF001  # a rank that shares no memory: linked() joins two that do
        one.link.control(FrameKind.CHUNK, Key(MESSAGE_GROUP, 0, 0), bytes(8))
        async with asyncio.timeout(30):
            await other.changed.wait()
        assert "share no memory" in other.losses[0]
