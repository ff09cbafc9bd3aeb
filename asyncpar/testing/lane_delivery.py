"""Conformance of lanes, first half: the transport of frames."""

from __future__ import annotations

import asyncio

from asyncpar.net.wire.frame import (
    HEADER_BYTES,
    MESSAGE_GROUP,
    SEALED_BYTES,
    TAIL_BYTES,
    FrameHeader,
    FrameKind,
    Segments,
)
from asyncpar.testing.lane_pairs import (
    LaneSuite,
    RecordingEvents,
    finished,
    frame,
    on_loop,
    pattern,
)


class LaneDelivery(LaneSuite):
    """Delivery: in order, once, into the given memory, and never faster than the receiver reads."""

    @on_loop
    async def test_frames_arrive_in_order_each_once(self) -> None:
        async with self.connect() as pair:
            events = RecordingEvents()
            pair.one.start(RecordingEvents())
            pair.other.start(events)
            payloads = [pattern(17 * tag % 4099, tag) for tag in range(500)]
            for tag, payload in enumerate(payloads):
                await finished(pair.one.send(*frame(tag, payload)))
            await events.until_tag(499)
            assert events.tags == list(range(500))
            assert [payload for _, payload in events.frames] == payloads

    @on_loop
    async def test_an_empty_payload_lands(self) -> None:
        async with self.connect() as pair:
            pair.one.start(RecordingEvents())
            events = RecordingEvents()
            pair.other.start(events)
            for tag in range(3):
                pair.one.send(*frame(tag, b""))
            await events.until_tag(2)
            assert [(header.tag, payload) for header, payload in events.frames] == [(0, b""), (1, b""), (2, b"")]

    @on_loop
    async def test_headers_arrive_as_they_were(self) -> None:
        async with self.connect() as pair:
            pair.one.start(RecordingEvents())
            events = RecordingEvents()
            pair.other.start(events)
            header = FrameHeader(FrameKind.EAGER, 2**32 - 1, 2**64 - 1, 2**64 - 2, 2**32 - 3, 2**32 - 4, 3)
            assert pair.one.send(header, memoryview(b"abc")) is None
            await events.until(lambda: bool(events.frames))
            assert events.frames == [(header, b"abc")]

    @on_loop
    async def test_large_payloads_land_in_the_lent_memory(self) -> None:
        async with self.connect() as pair:
            pair.one.start(RecordingEvents())
            posted = bytearray(self.large)
            events = RecordingEvents(lend_for=lambda header: memoryview(posted)[: header.length])
            pair.other.start(events)
            payload = pattern(self.large)
            await finished(pair.one.send(*frame(0, payload)))
            await events.until_tag(0)
            assert posted == payload

    @on_loop
    async def test_payloads_in_segments_arrive_whole(self) -> None:
        async with self.connect() as pair:
            pair.one.start(RecordingEvents())
            events = RecordingEvents()
            pair.other.start(events)
            sizes = [[self.large // 2, 3, self.large // 2], [1], [7] * 3000, [1000, self.large], []]
            for tag, lengths in enumerate(sizes):
                parts = [pattern(length, place) for place, length in enumerate(lengths)]
                header, whole = frame(tag, b"".join(parts))
                await finished(pair.one.send(header, Segments(map(memoryview, parts))))
                await events.until_tag(tag)
                assert events.frames[-1][1] == whole

    @on_loop
    async def test_small_segments_may_be_reused_at_once(self) -> None:
        async with self.connect() as pair:
            pair.one.start(RecordingEvents())
            first = pair.one.send(*frame(0, pattern(self.large)))
            parts = [bytearray(pattern(100, place)) for place in range(3)]
            whole = b"".join(parts)
            header, _ = frame(1, whole, kind=FrameKind.EAGER)
            assert pair.one.send(header, Segments(map(memoryview, parts))) is None
            for part in parts:
                part[:] = bytes(len(part))
            events = RecordingEvents()
            pair.other.start(events)
            await finished(first)
            await events.until_tag(1)
            assert events.frames[1][1] == whole

    @on_loop
    async def test_messages_keep_their_order_among_all_frames(self) -> None:
        async with self.connect() as pair:
            pair.one.start(RecordingEvents())
            events = RecordingEvents()
            pair.other.start(events)
            sizes = [10, 20, 30, 0, self.large, 5, 40_000, 6, 40_000, 50_000, 7, self.large, 8]
            buffers = [bytearray(pattern(size, tag)) for tag, size in enumerate(sizes)]
            sendings = []
            for tag, buffer in enumerate(buffers):
                group, kind = (
                    (1, FrameKind.BULK) if len(buffer) == self.large or tag == 2 else (MESSAGE_GROUP, FrameKind.EAGER)
                )
                header = FrameHeader(kind, 0, group, 0, tag, 0, len(buffer))
                sending = pair.one.send(header, memoryview(buffer))
                sendings.append(sending)
                if kind is FrameKind.EAGER:
                    assert sending is None
                    buffer[:] = bytes(len(buffer))
            for sending in sendings:
                await finished(sending)
            await events.until_tag(len(sizes) - 1)
            assert events.tags == list(range(len(sizes)))
            assert [payload for _, payload in events.frames] == [pattern(size, tag) for tag, size in enumerate(sizes)]

    @on_loop
    async def test_both_directions_work_at_once(self) -> None:
        async with self.connect() as pair:
            here, there = RecordingEvents(), RecordingEvents()
            pair.one.start(here)
            pair.other.start(there)
            sendings = [
                pair.one.send(*frame(0, pattern(self.large, 1))),
                pair.other.send(*frame(0, pattern(self.large, 2))),
            ]
            for sending in sendings:
                await finished(sending)
            await here.until_tag(0)
            await there.until_tag(0)
            assert there.frames[0][1] == pattern(self.large, 1)
            assert here.frames[0][1] == pattern(self.large, 2)

    @on_loop
    async def test_nothing_is_delivered_before_the_start(self) -> None:
        async with self.connect() as pair:
            pair.one.start(RecordingEvents())
            for tag in range(3):
                pair.one.send(*frame(tag, pattern(100, tag), kind=FrameKind.EAGER))
            events = RecordingEvents()
            assert pair.other.bytes_received == 0
            pair.other.start(events)
            await events.until_tag(2)
            assert events.tags == [0, 1, 2]

    @on_loop
    async def test_small_frames_are_taken_at_once_even_if_nobody_reads(self) -> None:
        async with self.connect() as pair:
            pair.one.start(RecordingEvents())
            first = pair.one.send(*frame(0, pattern(self.large)))
            buffer = bytearray(pattern(1000, 1))
            assert pair.one.send(*frame(1, buffer, kind=FrameKind.EAGER)) is None
            buffer[:] = bytes(1000)
            events = RecordingEvents()
            pair.other.start(events)
            await finished(first)
            await events.until_tag(1)
            assert events.frames[1][1] == pattern(1000, 1)

    @on_loop
    async def test_what_nobody_wants_is_dropped_and_the_next_frame_arrives(self) -> None:
        async with self.connect() as pair:
            pair.one.start(RecordingEvents())
            events = RecordingEvents(lend_for=lambda h: None if h.tag % 2 == 0 else memoryview(bytearray(h.length)))
            pair.other.start(events)
            sizes = [self.large, 5, 0, 0, 100_000, 3]
            for tag, size in enumerate(sizes):
                await finished(pair.one.send(*frame(tag, pattern(size, tag))))
            await events.until_tag(5)
            assert events.tags == [1, 3, 5]

    @on_loop
    async def test_diverted_memory_is_not_written_any_more(self) -> None:
        async with self.connect() as pair:
            pair.one.start(RecordingEvents())
            posted = bytearray(self.large)
            seen: asyncio.Future[tuple[bool, bytes]] = asyncio.get_running_loop().create_future()

            def divert() -> None:
                pair.other.divert()
                seen.set_result((0 in events.tags, bytes(posted)))

            def lend(header: FrameHeader) -> memoryview:
                if header.tag == 0:
                    asyncio.get_running_loop().call_soon(divert)
                    return memoryview(posted)
                return memoryview(bytearray(header.length))

            events = RecordingEvents(lend_for=lend)
            pair.other.start(events)
            sending = pair.one.send(*frame(0, pattern(self.large)))
            pair.one.send(*frame(1, b"next", kind=FrameKind.EAGER))
            await finished(sending)
            await events.until_tag(1)
            had_landed, content = await seen
            assert posted == content
            assert events.tags == ([0, 1] if had_landed else [1])

    @on_loop
    async def test_a_divert_between_frames_does_nothing(self) -> None:
        async with self.connect() as pair:
            pair.one.start(RecordingEvents())
            events = RecordingEvents()
            pair.other.start(events)
            pair.other.divert()
            pair.one.send(*frame(0, b"abc"))
            await events.until_tag(0)
            assert events.frames[0][1] == b"abc"

    @on_loop
    async def test_released_memory_goes_out_as_it_was_or_not_at_all(self) -> None:
        async with self.connect() as pair:
            pair.one.start(RecordingEvents())
            buffers = [bytearray(pattern(self.large, tag)) for tag in range(3)]
            sendings = [pair.one.send(*frame(tag, buffer)) for tag, buffer in enumerate(buffers)]
            await asyncio.wait({asyncio.create_task(asyncio.sleep(0))})  # a lane with a writer task gets its turn
            gone = [sending.release() if sending is not None else True for sending in sendings]
            for buffer in buffers:
                buffer[:] = bytes(len(buffer))
            assert all(sending is None or sending.done.cancelled() for sending in sendings)
            pair.one.send(*frame(3, b"end", kind=FrameKind.EAGER))
            events = RecordingEvents()
            pair.other.start(events)
            await events.until_tag(3)
            assert events.tags == [*(tag for tag in range(3) if gone[tag]), 3]
            for header, payload in events.frames[:-1]:
                assert payload == pattern(self.large, header.tag)

    @on_loop
    async def test_a_send_that_has_not_begun_is_dropped_when_released(self) -> None:
        if not self.has_back_pressure:
            return
        async with self.connect() as pair:
            pair.one.start(RecordingEvents())
            first = pair.one.send(*frame(0, pattern(2 * self.large)))
            second = pair.one.send(*frame(1, b"never"))
            assert second is not None
            assert second.release() is False
            assert second.done.cancelled()
            pair.one.send(*frame(2, b"end", kind=FrameKind.EAGER))
            events = RecordingEvents()
            pair.other.start(events)
            await finished(first)
            await events.until_tag(2)
            assert events.tags == [0, 2]

    @on_loop
    async def test_a_sender_is_held_back_while_nobody_reads(self) -> None:
        if not self.has_back_pressure:
            return
        for is_turned in (False, True):
            async with self.connect() as pair:
                sender, reader = (pair.other, pair.one) if is_turned else (pair.one, pair.other)
                sender.start(RecordingEvents())
                payload = pattern(self.large)
                sendings = [sender.send(*frame(tag, payload)) for tag in range(4)]
                pending = [sending.done for sending in sendings if sending is not None]
                _, still_pending = await asyncio.wait(pending, timeout=0.05)
                assert len(still_pending) >= 2
                reader.start(RecordingEvents(lend_for=lambda _: None))
                for sending in sendings:
                    await finished(sending)

    @on_loop
    async def test_two_sides_that_hold_each_other_back_both_go_on(self) -> None:
        def lend_for_the_last(header: FrameHeader) -> memoryview | None:
            return memoryview(bytearray(header.length)) if header.tag == 4 else None

        async with self.connect() as pair:
            here, there = RecordingEvents(lend_for=lend_for_the_last), RecordingEvents(lend_for=lend_for_the_last)
            pair.one.start(here)
            pair.other.start(there)
            payload = pattern(self.large)  # more than the channel holds, both ways, before either side reads
            sendings = [lane.send(*frame(tag, payload)) for tag in range(4) for lane in (pair.one, pair.other)]
            for lane in (pair.one, pair.other):
                lane.send(*frame(4, b"end", kind=FrameKind.EAGER))
            for sending in sendings:
                await finished(sending)
            await here.until_tag(4)
            await there.until_tag(4)

    @on_loop
    async def test_bytes_are_counted_with_headers(self) -> None:
        async with self.connect() as pair:
            pair.one.start(RecordingEvents())
            events = RecordingEvents()
            pair.other.start(events)
            for tag in range(10):
                pair.one.send(*frame(tag, pattern(10), kind=FrameKind.EAGER))
            await events.until_tag(9)
            least, most = (10 * (overhead + 10) for overhead in (HEADER_BYTES, SEALED_BYTES + TAIL_BYTES))
            assert least <= pair.one.bytes_sent == pair.other.bytes_received <= most
