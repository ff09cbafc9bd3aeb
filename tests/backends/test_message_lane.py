"""The message lane passes the shipped conformance suite of lanes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from asyncpar.backends.message_lane import MessageLane
from asyncpar.errors import PeerLost
from asyncpar.net.wire.frame import HEADER_BYTES, FrameKind
from asyncpar.testing.lanes import LaneConformance, LanePair, RecordingEvents, frame, pattern
from tests.backends.channels import MESSAGE_BYTES, WINDOW, MemoryChannel


class TestMessageLane(LaneConformance):
    large = 6 * 1024 * 1024

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[LanePair]:
        here, there = MemoryChannel.pair()
        one, other = MessageLane(here, kind="test"), MessageLane(there, kind="test")

        async def sever() -> None:
            here.cut("the test cut it")

        yield LanePair(one=one, other=other, sever=sever)
        over = PeerLost("the test is over")
        one.abort(over)
        other.abort(over)


async def test_no_more_messages_are_under_way_than_there_is_room_for() -> None:
    here, _there = MemoryChannel.pair()
    lane = MessageLane(here, kind="test")
    lane.start(RecordingEvents())
    sending = lane.send(*frame(0, bytes(2 * WINDOW * MESSAGE_BYTES)))
    assert sending is not None
    assert len(here.outgoing) == WINDOW
    assert {len(message) for message in here.outgoing} == {MESSAGE_BYTES}


async def test_memory_of_a_send_that_is_released_may_change_although_the_frame_goes_out() -> None:
    here, there = MemoryChannel.pair()
    one, other, events = MessageLane(here, kind="test"), MessageLane(there, kind="test"), RecordingEvents()
    one.start(RecordingEvents())
    payload = bytearray(pattern(2 * WINDOW * MESSAGE_BYTES))
    sending = one.send(*frame(3, payload))
    assert sending is not None
    assert sending.release()
    expected = bytes(payload)
    payload[:] = bytes(len(payload))
    other.start(events)
    await events.until_tag(3)
    assert events.frames[0][1] == expected


async def test_frames_that_wait_together_travel_in_one_message() -> None:
    here, _there = MemoryChannel.pair()
    lane = MessageLane(here, kind="test")
    lane.start(RecordingEvents())
    for tag in range(WINDOW + 20):
        lane.send(*frame(tag, b"abc", kind=FrameKind.EAGER))
    here.outgoing.clear()
    lane.has_room()
    assert [len(message) for message in here.outgoing] == [20 * (HEADER_BYTES + 3)]
