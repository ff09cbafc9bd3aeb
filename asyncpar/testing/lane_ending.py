"""Conformance of lanes, second half: the end of channels."""

from __future__ import annotations

import asyncio

from asyncpar.errors import PeerLost, ProtocolError
from asyncpar.net.wire.frame import FrameHeader, FrameKind
from asyncpar.testing.lane_pairs import (
    PATIENCE_SECONDS,
    LaneSuite,
    RecordingEvents,
    finished,
    frame,
    on_loop,
    pattern,
)


class LaneEnding(LaneSuite):
    """The end is reported exactly once, to the side that did not cause it, and nothing is left pending."""

    @on_loop
    async def test_a_cut_is_told_once_on_each_side_and_ends_pending_sends(self) -> None:
        async with self.connect() as pair:
            here, there = RecordingEvents(), RecordingEvents()
            pair.one.start(here)
            pair.other.start(there)
            pair.one.send(*frame(0, b"before"))
            await there.until_tag(0)
            await pair.sever()
            await here.until_lost()
            await there.until_lost()
            assert pair.one.send(*frame(1, b"after")) is None
            await asyncio.sleep(0)
            assert len(here.losses) == len(there.losses) == 1
            assert all(cause for cause in here.losses + there.losses)

    @on_loop
    async def test_pending_sends_end_with_the_error_of_the_loss(self) -> None:
        async with self.connect() as pair:
            here = RecordingEvents()
            pair.one.start(here)
            sending = pair.one.send(*frame(0, pattern(2 * self.large)))
            await pair.sever()
            await here.until_lost()
            if sending is not None:
                await asyncio.wait({sending.done}, timeout=PATIENCE_SECONDS)
                assert isinstance(sending.done.exception(), PeerLost)
            assert len(here.losses) == 1

    @on_loop
    async def test_a_cut_before_the_start_is_told_at_the_start(self) -> None:
        async with self.connect() as pair:
            here, there = RecordingEvents(), RecordingEvents()
            await pair.sever()
            pair.one.start(here)
            pair.other.start(there)
            await here.until_lost()
            await there.until_lost()
            assert len(here.losses) == len(there.losses) == 1

    @on_loop
    async def test_close_flushes_and_the_peer_learns_of_the_end_once(self) -> None:
        async with self.connect() as pair:
            here, there = RecordingEvents(), RecordingEvents()
            pair.one.start(here)
            pair.other.start(there)
            sending = pair.one.send(*frame(0, pattern(self.large)))
            pair.one.send(*frame(1, b"last", kind=FrameKind.EAGER))
            await pair.one.close()
            await there.until_lost()
            assert there.tags == [0, 1]
            assert len(there.losses) == 1
            assert here.losses == []
            await finished(sending)

    @on_loop
    async def test_both_sides_may_close_at_once_and_twice(self) -> None:
        async with self.connect() as pair:
            here, there = RecordingEvents(), RecordingEvents()
            pair.one.start(here)
            pair.other.start(there)
            async with asyncio.timeout(PATIENCE_SECONDS):
                await asyncio.gather(pair.one.close(), pair.other.close())
                await asyncio.gather(pair.one.close(), pair.other.close())
            assert pair.one.send(*frame(0, b"late")) is None
            assert len(here.losses) + len(there.losses) <= 1

    @on_loop
    async def test_a_lane_that_was_never_started_can_be_closed(self) -> None:
        async with self.connect() as pair:
            there = RecordingEvents()
            pair.other.start(there)
            await pair.one.close()
            await there.until_lost()
            assert len(there.losses) == 1

    @on_loop
    async def test_abort_ends_pending_sends_with_its_error_and_tells_only_the_peer(self) -> None:
        async with self.connect() as pair:
            here, there = RecordingEvents(), RecordingEvents(lend_for=lambda _: None)
            pair.one.start(here)
            pair.other.start(there)
            sending = pair.one.send(*frame(0, pattern(2 * self.large)))
            error = PeerLost("enough", cause="enough")
            pair.one.abort(error)
            pair.one.abort(error)
            if sending is not None:
                assert sending.done.exception() is error
            await there.until_lost()
            assert here.losses == []
            assert len(there.losses) == 1

    @on_loop
    async def test_a_protocol_error_of_the_owner_ends_the_lane(self) -> None:
        def refuse(header: FrameHeader) -> memoryview:
            raise ProtocolError(f"tag {header.tag} is not welcome")

        async with self.connect() as pair:
            here, there = RecordingEvents(), RecordingEvents(lend_for=refuse)
            pair.one.start(here)
            pair.other.start(there)
            pair.one.send(*frame(7, b"abc", kind=FrameKind.EAGER))
            pair.one.send(*frame(8, b"abc", kind=FrameKind.EAGER))
            await there.until_lost()
            await here.until_lost()
            assert there.losses == ["protocol error: tag 7 is not welcome"]
            assert len(here.losses) == 1
            assert there.frames == []

    @on_loop
    async def test_an_abort_inside_a_delivery_stops_deliveries(self) -> None:
        async with self.connect() as pair:
            there = RecordingEvents()

            def abort_at_three(header: FrameHeader) -> memoryview:
                if header.tag == 3:
                    pair.other.abort(PeerLost("stop", cause="stop"))
                return memoryview(bytearray(header.length))

            there.lend_for = abort_at_three
            here = RecordingEvents()
            pair.one.start(here)
            pair.other.start(there)
            for tag in range(10):
                pair.one.send(*frame(tag, b"abc", kind=FrameKind.EAGER))
            await here.until_lost()
            assert there.tags == [0, 1, 2]
            assert there.losses == []
