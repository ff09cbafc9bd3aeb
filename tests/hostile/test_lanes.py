"""Lanes whose peer sends what it should not: one loss, with its cause, and no other exception."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from asyncpar.errors import PeerLost, ProtocolError
from asyncpar.net.transport.connection import Connection, PartEvents
from asyncpar.net.transport.grpc_lane import CHUNK_BYTES, GrpcLane, encode_prefix
from asyncpar.net.transport.grpc_stream import ByteStream, StreamEnded
from asyncpar.net.transport.lane import MAX_FRAME_BYTES, LaneEvents
from asyncpar.net.transport.striped import StripedLane
from asyncpar.net.wire.frame import (
    HEADER_BYTES,
    SEALED_BYTES,
    STRIPE_BYTES,
    TAIL_BYTES,
    FrameHeader,
    FrameKind,
    Key,
    encode_header,
)
from asyncpar.net.wire.reader import FrameReader
from asyncpar.testing.lanes import RecordingEvents
from tests.hostile.inputs import bit_flips, mutated, truncations
from tests.hostile.victim import frame
from tests.net.transport.pairs import open_tcp_pair, protections

FRAME = frame(FrameKind.EAGER, Key(7, 1, 0))


def sealed(content: bytes, *, last: int = HEADER_BYTES) -> bytes:
    """Return the frame ``content`` as the first one that the dialer of ``protections`` sends, unchecked payload."""
    return protections(may_damage=False)[0].sealer.seal(content[:last]) + content[last:]


SEALED = sealed(FRAME)
CHUNK = encode_prefix(0, 0) + SEALED
_OVER = PeerLost("the test is over", cause="the test is over")


def lend_little(header: FrameHeader) -> memoryview | None:
    """Stand for an owner that has posted little."""
    return memoryview(bytearray(header.length)) if header.length <= 4096 else None


# -- the gRPC lane ---------------------------------------------------------------------------------------------------


class ScriptedStream(ByteStream):
    """Hands out some messages, then its end."""

    def __init__(self, *messages: bytes) -> None:
        self._messages = list(messages)

    async def agree(self) -> None: ...

    async def read(self) -> bytes:
        if not self._messages:
            raise StreamEnded("the peer closed the stream")
        return self._messages.pop(0)

    async def write(self, message: bytes) -> None: ...

    def cancel(self) -> None: ...


async def carry(*messages: bytes) -> RecordingEvents:
    """Return what the owner of a gRPC lane is told when these chunks come."""
    events = RecordingEvents(lend_for=lend_little)
    lane = GrpcLane(ScriptedStream(*messages), protections(may_damage=False)[1])
    lane.start(events)
    await lane.run()
    assert len(events.losses) == 1
    return events


async def test_a_chunk_that_is_cut_anywhere_ends_the_lane_without_a_frame() -> None:
    assert len((await carry(CHUNK)).frames) == 1
    for cut in truncations(CHUNK):
        events = await carry(cut)
        assert events.frames == []
        assert (
            events.losses[0].startswith("protocol error: chunk: expected 8 to") or "the peer closed" in events.losses[0]
        )
        assert ("in the middle of a frame" in events.losses[0]) == (len(cut) > 8)


async def test_a_chunk_with_any_bit_of_its_headers_changed_is_the_end_of_the_lane() -> None:
    for changed in bit_flips(CHUNK, last=8 + SEALED_BYTES):
        events = await carry(changed)
        assert events.frames == []
        assert events.losses[0].startswith("damaged link: grpc lane: ")


@pytest.mark.parametrize("returned", [1, 2**31, 2**32 - 2])
async def test_credit_that_was_never_spent_ends_the_lane(returned: int) -> None:
    events = await carry(encode_prefix(returned, 0))
    assert events.losses == [f"protocol error: chunks: the peer consumed {returned} more than were sent"]


async def test_a_chunk_that_is_too_long_ends_the_lane() -> None:
    events = await carry(bytes(CHUNK_BYTES + 9))
    assert events.losses[0].startswith("protocol error: chunk: expected")


# -- the stream lane -------------------------------------------------------------------------------------------------


async def test_a_frame_on_a_socket_with_any_bit_changed_is_the_end_of_the_lane() -> None:
    for place in range(0, 8 * (SEALED_BYTES + 48 + TAIL_BYTES), 5):
        async with open_tcp_pair() as (one, other):
            events = RecordingEvents(lend_for=lend_little)
            other.start(events)
            head = one._sealer.seal(FRAME[:HEADER_BYTES])  # noqa: SLF001  # a frame damaged after it was sealed needs the sealer that numbers this lane's frames
            checksum = one._sealer.begin_payload(head, 48)  # noqa: SLF001  # a frame damaged after it was sealed needs the sealer that numbers this lane's frames
            assert checksum is not None
            checksum.cover(memoryview(FRAME)[HEADER_BYTES:], 48)
            changed = bytearray(head + FRAME[HEADER_BYTES:] + checksum.tail())
            changed[place // 8] ^= 1 << place % 8
            os.write(one._descriptor, changed)  # noqa: SLF001  # what is damaged on the way goes past send(), straight into the socket
            await events.until_lost()
            assert events.losses[0].startswith("damaged link: tcp lane: frame 0: the checksum of its ")
            assert events.frames == []


# -- the striped lane ------------------------------------------------------------------------------------------------


class FedConnection(Connection):
    """A connection whose bytes the test makes up; what breaks the protocol ends it, as it ends a socket."""

    kind = "tcp"
    bytes_sent = bytes_received = 0

    def __init__(self) -> None:
        self._reader: FrameReader | None = None
        self._part: PartEvents | None = None
        self._left = b""

    def start(self, events: LaneEvents) -> None:
        raise AssertionError("it is one of several")

    def start_part(self, part: PartEvents) -> None:
        self._part = part
        self._reader = FrameReader(part, max_length=MAX_FRAME_BYTES, share=part.share, ended=part.ended)

    def send(self, header: FrameHeader, payload: object) -> None: ...

    def feed(self, content: bytes) -> None:
        """Take ``content`` now or after ``resume``."""
        self._left += content
        self._go_on()

    def hold(self) -> None:
        if self._reader is not None:
            self._reader.hold()

    def resume(self) -> None:
        if self._reader is not None and self._reader.is_held:
            self._guarded(resume=True)
            asyncio.get_running_loop().call_soon(self._go_on)

    def divert(self) -> None:
        if self._reader is not None:
            self._reader.divert()

    def abort(self, error: PeerLost) -> None:
        if self._reader is not None:
            self._reader.stop()
        self._reader = self._part = None

    def leave(self, error: PeerLost) -> None:
        self.abort(error)

    async def close(self) -> None:
        self.abort(_OVER)

    def _go_on(self) -> None:
        if self._reader is not None and not self._reader.is_held and self._left:
            self._guarded(resume=False)

    def _guarded(self, *, resume: bool) -> None:
        assert self._reader is not None
        part = self._part
        try:
            if resume:
                self._reader.resume()
            else:
                content, self._left = self._left, b""
                left = bytes(self._reader.feed(content))
                self._left = left + self._left
        except ProtocolError as error:
            self.abort(_OVER)
            assert part is not None
            part.lost(f"protocol error: {error}")


def parts(length: int, connections: int, tag: int = 1) -> list[bytes]:
    """Return what travels over each connection for a payload of ``length`` bytes in parts."""
    header = encode_header(FrameHeader(FrameKind.STRIPED, 3, 7, 1, tag, 5, length))
    return [
        header + bytes(length * (index + 1) // connections - length * index // connections)
        for index in range(connections)
    ]


def lend_two_stripes(header: FrameHeader) -> memoryview | None:
    """Stand for an owner that has posted room for the payload of these tests."""
    return memoryview(bytearray(header.length)) if header.length in (2 * STRIPE_BYTES, 48) else None


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("place", [0, 1])
async def test_a_changed_header_of_a_part_is_the_end_of_the_lane_or_waits(place: int, order: tuple[int, int]) -> None:
    outcomes = set()
    for bit in range(8 * HEADER_BYTES):
        streams = parts(2 * STRIPE_BYTES, 2)
        changed = bytearray(streams[place])
        changed[bit // 8] ^= 1 << bit % 8
        streams[place] = bytes(changed)
        events = RecordingEvents(lend_for=lend_two_stripes)
        connections = [FedConnection(), FedConnection()]
        StripedLane(connections).start(events)
        for index in order:
            connections[index].feed(streams[index])
        await asyncio.sleep(0)
        assert len(events.losses) <= 1
        outcomes.add((len(events.frames), len(events.losses)))
    assert outcomes <= {(0, 0), (0, 1)}, "no payload is ever made of parts that do not belong together"
    assert (0, 1) in outcomes


async def test_parts_in_any_disorder_end_the_lane_or_wait_and_raise_nothing() -> None:
    dice = random.Random(5)
    whole = [parts(2 * STRIPE_BYTES, 2, tag) for tag in range(3)]
    small = [frame(kind, Key(7, 1, 1)) for kind in FrameKind if kind is not FrameKind.STRIPED]
    heads = [encode_header(FrameHeader(FrameKind.STRIPED, 3, 7, 1, 1, 5, length)) for length in (0, 1, STRIPE_BYTES)]
    outcomes = set()
    for _ in range(1_500):
        events = RecordingEvents(lend_for=lend_two_stripes)
        connections = [FedConnection() for _ in range(2)]
        lane = StripedLane(connections)
        lane.start(events)
        for _ in range(dice.randrange(1, 8)):
            place = dice.randrange(2)
            content = dice.choice([whole[dice.randrange(3)][place], whole[0][place][:1000], *small, *heads])
            connections[place].feed(mutated(content, dice) if dice.random() < 0.1 else content)
            if dice.random() < 0.1:
                lane.divert()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(events.losses) <= 1
        outcomes.add((bool(events.frames), bool(events.losses)))
        lane.abort(_OVER)
    assert outcomes == {(False, False), (False, True), (True, False), (True, True)}
