"""A lane over several connections: its parts meet, keep their order, and end together."""

from __future__ import annotations

import asyncio
import socket

import pytest

from asyncpar.errors import PeerLost
from asyncpar.net.transport.lane import Lane
from asyncpar.net.transport.link import Link
from asyncpar.net.transport.stream import StreamLane
from asyncpar.net.transport.striped import StripedLane
from asyncpar.net.wire.frame import SEALED_BYTES, STRIPE_BYTES, TAIL_BYTES, FrameHeader, FrameKind, encode_header
from asyncpar.testing.lanes import RecordingEvents, finished, frame, pattern
from tests.net.transport.conversation import Judge
from tests.net.transport.pairs import open_striped_pair, open_tcp_pair

STRIPED = 3 * STRIPE_BYTES
"""Smallest payload that travels in parts over three connections."""


def streams(lane: StripedLane) -> list[StreamLane]:
    """Return the connections of ``lane`` as what they are here."""
    found = [connection for connection in lane.connections if isinstance(connection, StreamLane)]
    assert len(found) == len(lane.connections)
    return found


def striped_header(tag: int, length: int = STRIPED) -> FrameHeader:
    return frame(tag, b"")[0]._replace(kind=FrameKind.STRIPED, length=length)


async def test_a_large_payload_travels_over_all_connections_and_a_small_one_over_the_first() -> None:
    async with open_striped_pair() as (one, other):
        events = RecordingEvents()
        one.start(RecordingEvents())
        other.start(events)
        sending = one.send(*frame(0, pattern(STRIPED)))
        await events.until_tag(0)
        await finished(sending)
        part = STRIPE_BYTES + SEALED_BYTES + TAIL_BYTES
        assert [connection.bytes_sent for connection in one.connections] == [part] * 3
        assert events.frames == [(frame(0, pattern(STRIPED))[0], pattern(STRIPED))]
        await finished(one.send(*frame(1, pattern(2 * STRIPE_BYTES - 1))))
        await events.until_tag(1)
        assert [connection.bytes_sent for connection in one.connections[1:]] == [part] * 2
        assert one.bytes_sent == other.bytes_received == 3 * part + 2 * STRIPE_BYTES - 1 + SEALED_BYTES + TAIL_BYTES


async def test_a_payload_that_is_large_enough_for_some_connections_travels_over_these() -> None:
    async with open_striped_pair(4) as (one, other):
        events = RecordingEvents()
        one.start(RecordingEvents())
        other.start(events)
        for tag, parts in enumerate((2, 3, 4, 2)):
            sent = [connection.bytes_sent for connection in one.connections]
            await finished(one.send(*frame(tag, pattern(parts * STRIPE_BYTES, tag))))
            await events.until_tag(tag)
            more = [connection.bytes_sent - before for connection, before in zip(one.connections, sent, strict=True)]
            assert more == [STRIPE_BYTES + SEALED_BYTES + TAIL_BYTES] * parts + [0] * (4 - parts)
            assert events.frames[-1][1] == pattern(parts * STRIPE_BYTES, tag)


@pytest.mark.parametrize("late", [0, 1, 2])
async def test_frames_behind_a_striped_one_wait_for_its_last_part(late: int) -> None:
    async with open_striped_pair() as (one, other):
        events = RecordingEvents()
        one.start(RecordingEvents())
        other.start(events)
        payloads = [pattern(STRIPED, 1), b"small", pattern(STRIPED + 5, 2), b"end"]
        streams(other)[late]._transport.pause_reading()  # noqa: SLF001  # one connection falls behind the others: asyncio's transport is what can be stopped
        for tag, payload in enumerate(payloads):
            one.send(*frame(tag, payload))
        ahead = [connection for index, connection in enumerate(other.connections) if index != late]
        expected = STRIPE_BYTES if late else 1  # nothing is read before the first connection announces it
        while any(connection.bytes_received < expected for connection in ahead):  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0)
        assert events.tags == []
        streams(other)[late]._transport.resume_reading()  # noqa: SLF001  # one connection falls behind the others: asyncio's transport is what can be stopped
        await events.until_tag(3)
        assert events.tags == [0, 1, 2, 3]
        assert [payload for _, payload in events.frames] == payloads


async def test_many_striped_frames_of_all_sizes_arrive_whole_and_in_order_both_ways() -> None:
    async with open_striped_pair() as (one, other):
        here, there = RecordingEvents(), RecordingEvents()
        one.start(here)
        other.start(there)
        sizes = [(STRIPED * (tag % 5) // 2 + tag * 7919) % 2_000_000 for tag in range(40)]

        async def send_all(lane: Lane) -> None:
            for tag, size in enumerate(sizes):
                await finished(lane.send(*frame(tag, pattern(size, tag))))

        await asyncio.gather(send_all(one), send_all(other))
        await here.until_tag(39)
        await there.until_tag(39)
        for events in (here, there):
            assert events.tags == list(range(40))
            assert all(payload == pattern(sizes[header.tag], header.tag) for header, payload in events.frames)


async def test_a_payload_that_begins_on_one_connection_only_goes_out_from_a_copy_when_released() -> None:
    async with open_striped_pair(2) as (one, other):
        one.start(RecordingEvents())
        blocking = one.connections[0].send(*frame(0, pattern(32 << 20)))
        buffer = bytearray(pattern(2 * STRIPE_BYTES, 1))
        sending = one.send(*frame(1, buffer))
        assert sending is not None
        assert one.connections[1].bytes_sent == STRIPE_BYTES + SEALED_BYTES + TAIL_BYTES
        assert not streams(one)[1]._writer  # noqa: SLF001  # whether this connection has bytes left to write shows nowhere else
        assert sending.release() is True
        assert sending.done.cancelled()
        buffer[:] = bytes(len(buffer))
        events = RecordingEvents()
        other.start(events)
        await finished(blocking)
        await events.until_tag(1)
        assert events.tags == [0, 1]
        assert events.frames[1][1] == pattern(2 * STRIPE_BYTES, 1)


async def test_a_payload_of_which_no_part_has_begun_is_dropped_on_all_connections_when_released() -> None:
    async with open_striped_pair(2) as (one, other):
        one.start(RecordingEvents())
        blocking = one.send(*frame(0, pattern(64 << 20)))
        buffer = bytearray(pattern(STRIPED, 1))
        sending = one.send(*frame(1, buffer))
        assert sending is not None
        assert sending.release() is False
        buffer.clear()  # resizing raises BufferError while anybody holds the memory
        one.send(*frame(2, pattern(STRIPED, 2)))
        events = RecordingEvents()
        other.start(events)
        await finished(blocking)
        await events.until_tag(2)
        assert events.tags == [0, 2]
        assert events.frames[1][1] == pattern(STRIPED, 2)


async def test_diverted_parts_are_dropped_also_where_they_have_not_begun() -> None:
    async with open_striped_pair() as (one, other):
        posted = bytearray(STRIPED)
        events = RecordingEvents(
            lend_for=lambda header: memoryview(posted) if header.tag == 0 else memoryview(bytearray(header.length))
        )
        one.start(RecordingEvents())
        other.start(events)
        streams(other)[2]._transport.pause_reading()  # noqa: SLF001  # one connection falls behind the others: asyncio's transport is what can be stopped
        one.send(*frame(0, pattern(STRIPED)))
        one.send(*frame(1, b"next"))
        while other.connections[1].bytes_received < STRIPE_BYTES:  # noqa: ASYNC110 - no event tells of bytes
            await asyncio.sleep(0)
        other.divert()
        before = bytes(posted)
        streams(other)[2]._transport.resume_reading()  # noqa: SLF001  # one connection falls behind the others: asyncio's transport is what can be stopped
        await events.until_tag(1)
        assert events.tags == [1]
        assert posted == before
        events.frames.clear()
        del posted[:]


@pytest.mark.parametrize("dead", [0, 1, 2])
async def test_the_lane_ends_with_any_of_its_connections_and_says_so_once(dead: int) -> None:
    async with open_striped_pair() as (one, other):
        here, there = RecordingEvents(), RecordingEvents()
        one.start(here)
        other.start(there)
        sending = one.send(*frame(0, pattern(64 << 20)))
        assert sending is not None
        one.connections[dead].abort(PeerLost("cut"))
        streams(other)[dead]._socket.shutdown(socket.SHUT_RDWR)  # noqa: SLF001  # a connection that is cut from outside: the lane has no call that ends it as a broken network would
        await there.until_lost()
        streams(one)[(dead + 1) % 3]._socket.shutdown(socket.SHUT_RDWR)  # noqa: SLF001  # a connection that is cut from outside: the lane has no call that ends it as a broken network would
        await here.until_lost()
        with pytest.raises(PeerLost):
            await finished(sending)
        assert len(here.losses) == len(there.losses) == 1
        assert not any(connection._is_open for connection in (*streams(one), *streams(other)))  # noqa: SLF001  # a connection tells its lane alone that it is over


async def test_an_idle_lane_notices_that_its_last_connection_broke() -> None:
    async with open_striped_pair() as (one, other):
        here, there = RecordingEvents(), RecordingEvents()
        one.start(here)
        other.start(there)
        one.send(*frame(0, pattern(STRIPED)))
        await there.until_tag(0)
        streams(one)[2]._transport.abort()  # noqa: SLF001  # a connection that is cut from outside: the lane has no call that ends it as a broken network would
        await there.until_lost()
        await here.until_lost()
        assert there.losses == ["the peer closed the connection"]


@pytest.mark.parametrize(
    ("index", "header", "cause"),
    [
        (0, striped_header(0, 2 * STRIPE_BYTES - 1), "262143 bytes came in parts"),
        (1, striped_header(0)._replace(kind=FrameKind.BULK), "expected STRIPED on connection 1, got BULK"),
        (2, striped_header(7), "connection 2: expected its part of"),
    ],
)
async def test_parts_that_do_not_fit_end_the_lane(index: int, header: FrameHeader, cause: str) -> None:
    async with open_striped_pair() as (one, other):
        here, there = RecordingEvents(), RecordingEvents()
        one.start(here)
        other.start(there)
        if index == 2:
            one._first.send(striped_header(0), memoryview(bytes(STRIPE_BYTES)))  # noqa: SLF001  # a stripe that no sender would send goes past the lane's own bookkeeping
        sender = streams(one)[index]
        sender._socket.send(sender._sealer.seal(encode_header(header)))  # noqa: SLF001  # a frame that no sender would send, sealed with the numbers of this connection
        await there.until_lost()
        assert cause in there.losses[0]
        await here.until_lost()
        assert there.frames == []


async def test_a_peer_cannot_send_parts_over_a_single_connection() -> None:
    async with open_tcp_pair() as (one, other):
        losses: list[str] = []

        def lost(rank: int, cause: str) -> PeerLost:
            losses.append(cause)
            return PeerLost(cause, rank=rank, cause=cause)

        link = Link(
            peer=1,
            generation=0,
            referee=Judge(),
            on_control=lambda *_: None,
            on_lost=lost,
            on_message=lambda *_: None,
            max_message_bytes=1,
            message_budget=1,
        )
        link.attach(other)
        here = RecordingEvents()
        one.start(here)
        one._socket.send(one._sealer.seal(encode_header(striped_header(0))))  # noqa: SLF001  # a frame that no sender would send, sealed with the numbers of this connection
        await here.until_lost()
        assert losses == ["protocol error: a payload came in parts over a single connection"]


async def test_what_is_sent_before_the_close_arrives_whole() -> None:
    async with open_striped_pair() as (one, other):
        events = RecordingEvents()
        one.start(RecordingEvents())
        other.start(events)
        sendings = [one.send(*frame(tag, pattern(8 << 20, tag))) for tag in range(3)]
        await one.close()
        await events.until_lost()
        assert events.tags == [0, 1, 2]
        assert all(payload == pattern(8 << 20, header.tag) for header, payload in events.frames)
        for sending in sendings:
            await finished(sending)
