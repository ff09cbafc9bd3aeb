"""The gRPC lane: chunks and their credit, over a stream that the test plays."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from asyncpar.errors import PeerLost
from asyncpar.net.transport.grpc_lane import CHUNK_BYTES, WINDOW, GrpcLane, encode_prefix
from asyncpar.net.transport.grpc_stream import ByteStream, StreamEnded
from asyncpar.net.wire.frame import SEALED_BYTES, TAIL_BYTES, FrameKind, encode_header
from asyncpar.testing import run_virtual
from asyncpar.testing.lanes import RecordingEvents, frame
from tests.net.transport.pairs import protections


class PlayedStream(ByteStream):
    """The test is the peer: it puts into ``incoming`` (None ends the stream) and looks at ``written``."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.written: list[bytes] = []
        self.is_cancelled = False

    async def agree(self) -> None: ...

    async def read(self) -> bytes:
        message = await self.incoming.get()
        if message is None:
            raise StreamEnded("the peer closed the stream")
        return message

    async def write(self, message: bytes) -> None:
        self.written.append(message)

    def cancel(self) -> None:
        self.is_cancelled = True


@asynccontextmanager
async def running(*, may_damage: bool = False) -> AsyncIterator[tuple[GrpcLane, PlayedStream, RecordingEvents]]:
    stream, events = PlayedStream(), RecordingEvents()
    lane = GrpcLane(stream, protections(may_damage=may_damage)[0])
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(lane.run())
        lane.start(events)
        yield lane, stream, events
        lane.abort(PeerLost("the test is over"))
    assert stream.is_cancelled


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def credit(count: int, number: int = 0) -> bytes:
    """Return what chunk ``number`` begins with."""
    return encode_prefix(count, number)


LAST_CHUNK = credit(0xFFFFFFFF)


class CancelledStream(PlayedStream):
    """What a call says once its channel is closed, though nobody has cancelled the reader."""

    async def read(self) -> bytes:
        raise asyncio.CancelledError


async def test_a_stream_that_was_cancelled_under_the_lane_loses_it() -> None:
    lane, events = GrpcLane(CancelledStream(), protections()[0]), RecordingEvents()
    lane.start(events)
    async with asyncio.timeout(30):
        await lane.run()
    assert events.losses == ["the stream was cancelled"]


async def test_frames_that_wait_together_travel_in_one_chunk() -> None:
    async with running() as (lane, stream, _):
        for tag in range(20):
            lane.send(*frame(tag, b"abc", kind=FrameKind.EAGER))
        await settle()
        assert [len(chunk) for chunk in stream.written] == [8 + 20 * (SEALED_BYTES + 3)]


async def test_no_more_chunks_are_under_way_than_the_window_allows() -> None:
    async with running() as (lane, stream, _):
        sending = lane.send(*frame(0, bytes(2 * WINDOW * CHUNK_BYTES)))
        assert sending is not None
        await settle()
        assert len(stream.written) == WINDOW
        assert all(len(chunk) == 8 + CHUNK_BYTES for chunk in stream.written)
        stream.incoming.put_nowait(credit(3))
        await settle()
        assert len(stream.written) == WINDOW + 3
        for number in (1, 2):
            stream.incoming.put_nowait(credit(WINDOW - 2, number))
            await settle()
        assert sending.done.done()


async def test_consumed_chunks_are_given_back_even_if_there_is_nothing_to_send() -> None:
    async with running() as (_, stream, events):
        sealer = protections(may_damage=False)[1].sealer
        for tag in range(WINDOW):
            header, payload = frame(tag, b"abc")
            stream.incoming.put_nowait(credit(0, tag) + sealer.seal(encode_header(header)) + payload)
        await events.until_tag(WINDOW - 1)
        await settle()
        assert sum(int.from_bytes(chunk[:4], "little") for chunk in stream.written) == WINDOW
        assert all(len(chunk) == 8 for chunk in stream.written)


@pytest.mark.parametrize(
    ("chunk", "cause"),
    [
        (b"", "protocol error: chunk: expected 8 to"),
        (b"abc", "protocol error: chunk: expected 8 to"),
        (bytes(9 + CHUNK_BYTES), "protocol error: chunk: expected 8 to"),
        (credit(1), "protocol error: chunks: the peer consumed 1 more than were sent"),
        (credit(0, 1), "damaged link: grpc lane: chunk 0: the checksum of its beginning is wrong"),
        (credit(0) + bytes(SEALED_BYTES), "damaged link: grpc lane: frame 0: the checksum of its header"),
        (LAST_CHUNK, "the peer closed the stream"),
        (None, "the peer closed the stream"),
    ],
)
async def test_chunks_that_end_the_lane(chunk: bytes | None, cause: str) -> None:
    async with running() as (_, stream, events):
        stream.incoming.put_nowait(chunk)
        await events.until_lost()
        assert events.losses[0].startswith(cause)


async def test_a_stream_that_ends_in_mid_frame_says_so() -> None:
    async with running() as (_, stream, events):
        header, payload = frame(0, b"abcdef")
        stream.incoming.put_nowait(credit(0) + protections()[1].sealer.seal(encode_header(header)) + payload[:3])
        stream.incoming.put_nowait(None)
        await events.until_lost()
        assert events.losses == ["the peer closed the stream in the middle of a frame"]


async def test_closing_sends_all_frames_and_then_the_last_chunk() -> None:
    async with running() as (lane, stream, events):
        lane.send(*frame(0, b"abc", kind=FrameKind.EAGER))
        closing = asyncio.create_task(lane.close())
        await settle()
        stream.incoming.put_nowait(None)
        await closing
        assert [len(chunk) for chunk in stream.written] == [8 + SEALED_BYTES + 3, 8]
        assert stream.written[-1] == credit(0xFFFFFFFF, 1)
        assert events.losses == []


async def send_positions(stream: PlayedStream, seconds: int) -> None:
    """Be a peer that says once a second what it has consumed: nothing more."""
    for number in range(seconds):
        stream.incoming.put_nowait(credit(0, number))
        await asyncio.sleep(1.0)


@pytest.mark.parametrize(("length", "chunks", "limit"), [(100, 1, 8), (3 * WINDOW * CHUNK_BYTES, WINDOW, 12)])
def test_chunks_that_the_peer_does_not_get_lose_the_lane_even_if_the_window_is_full(
    length: int, chunks: int, limit: int
) -> None:
    async def scenario() -> None:
        async with running(may_damage=True) as (lane, stream, events):
            lane.send(*frame(0, bytes(length)))
            await send_positions(stream, limit)
            cause = r"damaged link: grpc lane: of \d+ bytes that were sent only 0 have come"
            assert [bool(re.match(cause, loss)) for loss in events.losses] == [True]
            assert sum(len(chunk) > 8 for chunk in stream.written) == chunks

    run_virtual(scenario())


@pytest.mark.parametrize("length", [100, 3 * WINDOW * CHUNK_BYTES])
def test_each_side_says_once_a_second_what_it_has_consumed_even_if_the_window_is_full(length: int) -> None:
    async def scenario() -> None:
        async with running(may_damage=True) as (lane, stream, events):
            lane.send(*frame(0, bytes(length)))
            await settle()
            before = len(stream.written)
            await asyncio.sleep(5.5)
            assert [len(chunk) for chunk in stream.written[before:]] == [8] * 5
            assert events.losses == []  # a peer whose loop is busy says nothing

    run_virtual(scenario())


def test_a_side_that_holds_its_reader_says_nothing() -> None:
    async def scenario() -> None:
        async with running(may_damage=True) as (lane, stream, _):
            lane.hold()
            await asyncio.sleep(5.5)
            assert stream.written == []

    run_virtual(scenario())


def test_a_side_whose_reader_is_held_again_and_again_says_nothing() -> None:
    async def scenario() -> None:
        async with running(may_damage=True) as (lane, stream, _):
            for _ in range(55):
                lane.hold()
                lane.resume()
                await asyncio.sleep(0.1)
            assert stream.written == []

    run_virtual(scenario())


def test_chunks_that_come_slowly_keep_the_lane() -> None:
    async def scenario() -> None:
        async with running(may_damage=True) as (lane, stream, events):
            lane.send(*frame(0, bytes(WINDOW * CHUNK_BYTES - SEALED_BYTES - TAIL_BYTES)))
            await settle()
            for second in range(8 * WINDOW):
                stream.incoming.put_nowait(credit(int(second % 8 == 7), second))
                await asyncio.sleep(1.0)
            assert events.losses == []
            assert sum(len(chunk) > 8 for chunk in stream.written) == WINDOW

    run_virtual(scenario())
