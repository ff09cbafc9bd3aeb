"""The TCP lane: who gets in, where bytes land, how it ends."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from asyncpar.errors import AuthenticationError, PeerLost, UsageError
from asyncpar.net.transport import handshaking, stream
from asyncpar.net.transport.busy_poll import BusyPoll
from asyncpar.net.transport.connect import TCP, TcpListener, dial_tcp
from asyncpar.net.transport.handshaking import Porter
from asyncpar.net.transport.queue import OWNED_LIMIT
from asyncpar.net.transport.sockets import Pulse
from asyncpar.net.transport.stream import StreamLane
from asyncpar.net.wire.frame import SEALED_BYTES, TAIL_BYTES, FrameKind
from asyncpar.net.wire.handshake import Handshake
from asyncpar.testing.lanes import RecordingEvents, finished, frame, pattern
from tests.net.transport.pairs import SECRET, TERMS, open_tcp_pair


@dataclass
class Door:
    """A listener, the lanes that came in, and the reasons why others did not."""

    listener: TcpListener
    porter: Porter
    lanes: asyncio.Queue[StreamLane]
    refused: list[Exception]


@asynccontextmanager
async def listening() -> AsyncIterator[Door]:
    lanes: asyncio.Queue[StreamLane] = asyncio.Queue()
    refused: list[Exception] = []
    porter = Porter(
        TCP,
        secret=SECRET,
        busy_poll=BusyPoll(),
        find_terms=lambda token: TERMS if token == TERMS.token else None,
        on_lane=lambda _, lane: lanes.put_nowait(lane),
        on_refused=refused.append,
    )
    listener = TcpListener(porter, bind="127.0.0.1")
    await listener.start()
    try:
        yield Door(listener, porter, lanes, refused)
    finally:
        await listener.stop()
        await asyncio.sleep(0)  # transports close in a callback


@asynccontextmanager
async def dialed(door: Door) -> AsyncIterator[tuple[StreamLane, StreamLane]]:
    async with asyncio.timeout(30):
        one = await dial_tcp("127.0.0.1", door.listener.port, TERMS, secret=SECRET, busy_poll=BusyPoll())
        other = await door.lanes.get()
    try:
        yield one, other
    finally:
        one.abort(PeerLost("the test is over"))
        other.abort(PeerLost("the test is over"))


async def answer_to(listener: TcpListener, opening: bytes) -> bytes:
    """Say ``opening`` and return all that the listener says until it closes."""
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(opening)
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()


@pytest.mark.parametrize(
    "opening",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\0" * 5000,
        Handshake.dial(TERMS, secret=b"wrong" * 8, nonce=b"n" * 32).opening,
        Handshake.dial(replace(TERMS, token=b"u" * 16), secret=SECRET, nonce=b"n" * 32).opening,
    ],
    ids=["http", "tls", "http2", "zeros", "wrong secret", "unknown token"],
)
async def test_a_peer_that_lacks_the_secret_or_an_agreement_gets_no_byte(opening: bytes) -> None:
    async with listening() as door:
        assert await answer_to(door.listener, opening) == b""
        assert door.lanes.empty()
        assert len(door.refused) == 1
        assert isinstance(door.refused[0], AuthenticationError)
        assert door.porter.strangers == 0


async def test_a_stranger_that_says_nothing_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshaking, "STRANGER_SECONDS", 0.05)
    async with listening() as door:
        opening = Handshake.dial(TERMS, secret=SECRET, nonce=b"n" * 32).opening
        assert await answer_to(door.listener, b"") == b""
        assert await answer_to(door.listener, opening[:-1]) == b""
        assert door.lanes.empty()
        assert all(isinstance(error, TimeoutError) for error in door.refused)
        assert len(door.refused) == 2


async def test_strangers_are_few_and_one_of_them_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshaking, "MAX_STRANGERS", 3)
    async with listening() as door:
        idle = [await asyncio.open_connection("127.0.0.1", door.listener.port) for _ in range(5)]
        ends = [asyncio.create_task(reader.read()) for reader, _ in idle]
        async with asyncio.timeout(30):
            while sum(end.done() for end in ends) < 2:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        assert door.porter.strangers == 3
        async with dialed(door):
            assert (door.porter.strangers, door.porter.guests) in {(3, 0), (2, 0)}
        for _, writer in idle:
            writer.close()
        await asyncio.wait(ends)


async def test_a_listener_without_the_secret_is_not_believed() -> None:
    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(116)
        writer.write(b"x" * 64)
        writer.close()

    server = await asyncio.start_server(pretend, "127.0.0.1", 0)
    async with server:
        with pytest.raises(AuthenticationError, match="could not prove that it holds the secret"):
            await dial_tcp("127.0.0.1", server.sockets[0].getsockname()[1], TERMS, secret=SECRET, busy_poll=BusyPoll())


async def test_a_dial_is_refused_when_nobody_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionRefusedError):
            await dial_tcp("127.0.0.1", unused.getsockname()[1], TERMS, secret=SECRET, busy_poll=BusyPoll())


async def test_an_address_that_is_not_ours_cannot_be_listened_on() -> None:
    porter = Porter(TCP, secret=SECRET, busy_poll=BusyPoll(), find_terms=lambda _: None, on_lane=lambda *_: None)
    listener = TcpListener(porter, bind="192.0.2.1")
    with pytest.raises(UsageError, match=r"bind: 192\.0\.2\.1 cannot be bound"):
        await listener.start()


async def test_frames_right_behind_the_handshake_are_frames() -> None:
    """The dialer's first frame may arrive together with its last handshake message."""
    async with listening() as door:
        lane = await dial_tcp("127.0.0.1", door.listener.port, TERMS, secret=SECRET, busy_poll=BusyPoll())
        for tag in range(3):
            lane.send(*frame(tag, pattern(1000, tag), kind=FrameKind.EAGER))
        events = RecordingEvents()
        other = await door.lanes.get()
        other.start(events)
        await events.until_tag(2)
        assert events.tags == [0, 1, 2]
        lane.abort(PeerLost("the test is over"))
        other.abort(PeerLost("the test is over"))


async def test_small_frames_leave_without_a_turn_of_the_loop() -> None:
    async with open_tcp_pair() as (one, other):
        raw = other._transport.get_extra_info("socket")  # noqa: SLF001  # the socket that has received is looked at before the loop reads from it
        assert one.send(*frame(0, b"abc")) is None
        assert raw.fileno() >= 0
        peeked = socket.socket(fileno=socket.dup(raw.fileno()))
        with peeked:
            assert peeked.recv(100, socket.MSG_PEEK)[SEALED_BYTES:-TAIL_BYTES] == b"abc"


async def test_a_connection_cut_in_mid_frame_says_so() -> None:
    async with open_tcp_pair() as (one, other):
        there = RecordingEvents()
        one.start(RecordingEvents())
        other.start(there)
        one.send(*frame(0, pattern(64 << 20)))
        one.abort(PeerLost("enough"))
        await there.until_lost()
        assert there.losses[0] in {
            "the peer closed the connection in the middle of a frame",
            "the connection broke: Connection reset by peer",
        }
        assert there.frames == []


async def test_garbage_on_the_wire_ends_the_lane() -> None:
    async with open_tcp_pair() as (one, other):
        here, there = RecordingEvents(), RecordingEvents()
        one.start(here)
        other.start(there)
        one._socket.send(b"garbage" * 10)  # noqa: SLF001  # garbage goes past send(), straight into the socket
        await there.until_lost()
        await here.until_lost()
        assert there.losses == ["damaged link: tcp lane: frame 0: the checksum of its header is wrong"]


async def test_a_peer_that_never_reads_small_frames_is_given_up() -> None:
    async with open_tcp_pair() as (one, _):
        here = RecordingEvents()
        one.start(here)
        payload = bytes(60_000)
        for tag in range(OWNED_LIMIT // len(payload) + 200):
            one.send(*frame(tag, payload, kind=FrameKind.EAGER))
        await here.until_lost()
        assert here.losses == ["the peer does not read: too many small frames wait for it"]


async def test_a_released_frame_in_mid_send_arrives_as_it_was() -> None:
    async with open_tcp_pair() as (one, other):
        one.start(RecordingEvents())
        buffer = bytearray(pattern(64 << 20))
        sending = one.send(*frame(0, buffer))
        assert sending is not None
        assert sending.release() is True
        buffer[:] = bytes(len(buffer))
        events = RecordingEvents()
        other.start(events)
        await events.until_tag(0)
        assert events.frames[0][1] == pattern(64 << 20)


async def test_pending_sends_finish_when_the_peer_reads() -> None:
    async with open_tcp_pair() as (one, other):
        one.start(RecordingEvents())
        sending = one.send(*frame(0, pattern(64 << 20)))
        assert sending is not None
        other.start(RecordingEvents(lend_for=lambda _: None))
        await finished(sending)


def tcp_info(*, retransmits: int = 0, probes: int = 0, silent_milliseconds: int = 0) -> bytes:
    return struct.pack("<BBBB4x48xI", 1, 0, retransmits, probes, silent_milliseconds)


@pytest.mark.parametrize(
    ("states", "verdicts"),
    [
        ([tcp_info(silent_milliseconds=60_000)] * 3, [False, False, False]),  # idle: keepalive watches
        ([tcp_info(retransmits=2, silent_milliseconds=4500)] * 2, [False, True]),
        ([tcp_info(probes=1, silent_milliseconds=4500)] * 2, [False, True]),
        ([tcp_info(probes=1, silent_milliseconds=1000)] * 3, [False, False, False]),  # a closed window, answered
        ([tcp_info(retransmits=1, silent_milliseconds=5000), tcp_info()] * 2, [False, False, False, False]),
        ([b""] * 3, [False, False, False]),  # no such thing on this platform
    ],
)
def test_a_peer_is_dead_when_the_kernel_keeps_asking_and_gets_no_answer(
    states: list[bytes], verdicts: list[bool]
) -> None:
    remaining = iter(states)
    pulse = Pulse(lambda: next(remaining))
    assert [pulse.is_silent() for _ in verdicts] == verdicts


def test_the_limit_of_silence_can_be_chosen() -> None:
    pulse = Pulse(lambda: tcp_info(retransmits=2, silent_milliseconds=20_000), 30.0)
    assert [pulse.is_silent(), pulse.is_silent()] == [False, False]


async def test_a_lane_lost_while_it_is_flushed_is_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "FLUSH_SECONDS", 60.0)
    async with open_tcp_pair() as (one, _):
        one.start(RecordingEvents())
        payload = pattern(30_000_000)
        sending = one.send(*frame(0, payload))
        assert sending is not None
        closing = asyncio.ensure_future(one.close())
        await asyncio.sleep(0)
        one.connection_lost(ConnectionResetError())  # the transport is the first to notice
        async with asyncio.timeout(30):
            await closing
        with pytest.raises(PeerLost):
            await sending.done


async def test_a_peer_that_reads_slowly_gets_all_of_a_lane_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "FLUSH_SECONDS", 0.2)
    async with open_tcp_pair() as (one, other):
        events = RecordingEvents()
        one.start(RecordingEvents())
        other.start(events)
        payload = pattern(60_000_000)
        one.send(*frame(0, payload))
        closing = asyncio.ensure_future(one.close())
        pauses = 0
        async with asyncio.timeout(30):
            while not events.losses:
                other.hold()
                await asyncio.sleep(0.05)
                pauses += 1
                other.resume()
                await asyncio.sleep(0)  # here the loop asks the system what can be read,
                await asyncio.sleep(0)  # and here it reads
        assert pauses > 8  # it took longer than a peer that reads nothing is waited for
        assert [bytes(content) == payload for _, content in events.frames] == [True]
        await closing


async def test_inside_a_host_the_kernel_does_not_pace() -> None:
    option = getattr(socket, "TCP_CONGESTION", None)
    if option is None:
        pytest.skip("this system does not let one choose")
    async with open_tcp_pair() as (one, other):
        for lane in (one, other):
            assert lane._socket.getsockopt(socket.IPPROTO_TCP, option, 16).rstrip(b"\0") == b"reno"  # noqa: SLF001  # options of the socket are asked of the system
