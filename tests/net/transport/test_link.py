"""One link over a lane that the test plays: waiting messages, and messages that do not fit."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from asyncpar.errors import PeerLost
from asyncpar.net.transport.flow_control import EAGER_LIMIT
from asyncpar.net.transport.lane import Lane, LaneEvents, Sending
from asyncpar.net.transport.link import Link
from asyncpar.net.wire.frame import FrameHeader, FrameKind, Key, Payload
from tests.net.transport.conversation import Judge, frame

LARGE = EAGER_LIMIT + 1


@dataclass
class PlayedLane(Lane):
    """Writes down what is sent; breaks inside the send of frame number ``breaks_at``."""

    breaks_at: int | None = None
    sent: list[FrameHeader] = field(default_factory=list)
    events: LaneEvents | None = None
    bytes_sent = bytes_received = 0

    def start(self, events: LaneEvents) -> None:
        self.events = events

    def send(self, header: FrameHeader, payload: Payload) -> Sending | None:
        self.sent.append(header)
        if len(self.sent) == self.breaks_at and self.events is not None:
            self.events.lost("the cable is cut")
        return None

    def divert(self) -> None: ...
    def abort(self, error: PeerLost) -> None: ...
    async def close(self) -> None: ...


def make_link(judge: Judge) -> Link:
    return Link(
        peer=1,
        generation=0,
        referee=judge,
        on_control=lambda rank, header, payload: None,
        on_lost=lambda rank, cause: PeerLost(cause, rank=rank, cause=cause),
        on_message=lambda payload, release: None,
        max_message_bytes=1000,
        message_budget=1000,
    )


async def test_a_lane_that_breaks_over_the_backlog_ends_every_send_in_it() -> None:
    link, lane = make_link(Judge()), PlayedLane(breaks_at=2)
    sendings = [link.send(Key(1, number, 0), 7, memoryview(b"x")) for number in range(4)]
    link.attach(lane)
    assert len(lane.sent) == 2
    for sending in sendings[2:]:
        assert sending is not None
        assert sending.done.done()
        with pytest.raises(PeerLost, match="the cable is cut"):
            sending.done.result()


@pytest.mark.parametrize("length", [LARGE - 1, LARGE + 1])
async def test_a_grant_of_another_operation_sends_nothing_and_is_reported(length: int) -> None:
    """The operation is about to fail with the names of both; lengths that differ are no news then."""
    judge = Judge()
    link, lane = make_link(judge), PlayedLane()
    link.attach(lane)
    grant = frame(FrameKind.GRANT, Key(1, 0, 0), 8, fingerprint=8)
    place = link.lend(grant)
    assert place is not None
    place[:] = LARGE.to_bytes(8, "little")
    link.landed(grant)
    sending = link.send(Key(1, 0, 0), 7, memoryview(bytes(length)))
    assert [header.fingerprint for header in judge.mismatches] == [8]
    assert sending is not None
    assert not sending.done.done()
    assert lane.sent == []
    link.forget(1, 0)
    assert sending.done.cancelled()
