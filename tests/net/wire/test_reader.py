from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpar.errors import ProtocolError
from asyncpar.net.wire.frame import HEADER_BYTES, FrameHeader, FrameKind, encode_header
from asyncpar.net.wire.reader import DIRECT_BYTES, STAGING_BYTES, FrameReader
from tests.soak import chosen

MAX_LENGTH = 1 << 20


class Sink:
    """Lends fresh memory, except for tags in ``unwanted``; keeps what landed."""

    def __init__(self, unwanted: frozenset[int] = frozenset()) -> None:
        self.unwanted = unwanted
        self.frames: list[tuple[int, bytes]] = []
        self.lent: list[memoryview] = []

    def lend(self, header: FrameHeader) -> memoryview | None:
        if header.tag in self.unwanted:
            return None
        self.lent.append(memoryview(bytearray(header.length)))
        return self.lent[-1]

    def landed(self, header: FrameHeader) -> None:
        self.frames.append((header.tag, bytes(self.lent[-1])))


def encode(tag: int, payload: bytes) -> bytes:
    return encode_header(FrameHeader(FrameKind.BULK, 0, 1, 2, tag, 0, len(payload))) + payload


def pour(reader: FrameReader, stream: bytes, cuts: list[int]) -> None:
    """Give ``stream`` to ``reader`` through its buffers, in reads of at most the lengths in ``cuts``, repeated."""
    position, turn = 0, 0
    while position < len(stream):
        place = reader.buffer()
        assert len(place) > 0
        count = min(len(place), len(stream) - position, cuts[turn % len(cuts)])
        place[:count] = stream[position : position + count]
        reader.advance(count)
        position += count
        turn += 1


def feed(reader: FrameReader, stream: bytes, cuts: list[int]) -> None:
    position, turn = 0, 0
    while position < len(stream):
        count = cuts[turn % len(cuts)]
        reader.feed(stream[position : position + count])
        position += count
        turn += 1


ways = pytest.mark.parametrize("give", [pour, feed])
payloads = st.lists(
    st.one_of(
        st.binary(max_size=60), st.integers(0, 200_000).map(lambda size: bytes(size % 251 for _ in range(1)) * size)
    ),
    max_size=8,
)
cut_lists = st.lists(st.one_of(st.integers(1, 100), st.integers(1, 300_000)), min_size=1, max_size=6)


@ways
@settings(max_examples=chosen(20, soak=80), deadline=None)
@given(payloads=payloads, cuts=cut_lists, unwanted=st.frozensets(st.integers(0, 7)))
def test_frames_survive_any_cut(give, payloads: list[bytes], cuts: list[int], unwanted: frozenset[int]) -> None:  # type: ignore[no-untyped-def]
    sink = Sink(unwanted)
    reader = FrameReader(sink, max_length=MAX_LENGTH)
    give(reader, b"".join(encode(tag, payload) for tag, payload in enumerate(payloads)), cuts)
    assert sink.frames == [(tag, payload) for tag, payload in enumerate(payloads) if tag not in unwanted]
    assert reader.is_between_frames
    reader.check_end()


@ways
def test_frames_survive_a_cut_at_every_byte(give) -> None:  # type: ignore[no-untyped-def]
    stream = encode(0, b"abc") + encode(1, b"") + encode(2, bytes(range(100)))
    for cut in range(1, len(stream)):
        sink = Sink()
        give(FrameReader(sink, max_length=MAX_LENGTH), stream, [cut, len(stream)])
        assert sink.frames == [(0, b"abc"), (1, b""), (2, bytes(range(100)))]


@ways
@settings(max_examples=chosen(50, soak=200), deadline=None)
@given(stream=st.binary(max_size=300), cuts=cut_lists)
def test_garbage_ends_in_protocol_error_or_waits_for_more(give, stream: bytes, cuts: list[int]) -> None:  # type: ignore[no-untyped-def]
    sink = Sink()
    reader = FrameReader(sink, max_length=MAX_LENGTH)
    try:
        give(reader, stream, cuts)
    except ProtocolError:
        assert len(stream) >= HEADER_BYTES
    else:
        assert len(stream) < HEADER_BYTES
    assert sink.lent == []


@ways
@settings(max_examples=chosen(50, soak=200), deadline=None)
@given(position=st.integers(0, HEADER_BYTES - 1), bit=st.integers(0, 7), cuts=cut_lists)
def test_a_flipped_bit_in_a_header_never_raises_anything_but_protocol_error(  # type: ignore[no-untyped-def]
    give, position: int, bit: int, cuts: list[int]
) -> None:
    stream = bytearray(encode(1, b"x" * 50) + encode(2, b"y" * 50))
    stream[position] ^= 1 << bit
    sink = Sink()
    with contextlib.suppress(ProtocolError):
        give(FrameReader(sink, max_length=MAX_LENGTH), bytes(stream), cuts)
    assert sum(len(place) for place in sink.lent) <= 2 * MAX_LENGTH


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [(0, 0x00, "magic"), (2, 9, "version: this side speaks 1, the peer sent 9"), (3, 99, "kind")],
)
def test_a_bad_header_is_named(position: int, value: int, message: str) -> None:
    stream = bytearray(encode(0, b"abc"))
    stream[position] = value
    with pytest.raises(ProtocolError, match=message):
        FrameReader(Sink(), max_length=MAX_LENGTH).feed(stream)


def test_an_oversize_frame_is_refused_before_memory_is_lent() -> None:
    sink = Sink()
    header = FrameHeader(FrameKind.BULK, 0, 1, 2, 3, 0, MAX_LENGTH + 1)
    with pytest.raises(
        ProtocolError, match=f"at most {MAX_LENGTH} bytes are allowed, the peer declared {MAX_LENGTH + 1}"
    ):
        FrameReader(sink, max_length=MAX_LENGTH).feed(encode_header(header))
    assert sink.lent == []


@ways
@settings(max_examples=chosen(20, soak=60), deadline=None)
@given(end=st.integers(1, 139), cuts=cut_lists)
def test_a_truncated_stream_is_noticed_at_its_end(give, end: int, cuts: list[int]) -> None:  # type: ignore[no-untyped-def]
    stream = encode(0, b"") + encode(1, b"z" * 60)
    reader = FrameReader(Sink(), max_length=MAX_LENGTH)
    give(reader, stream[:end], cuts)
    if end == HEADER_BYTES:
        reader.check_end()
    else:
        with pytest.raises(ProtocolError, match="middle of a frame"):
            reader.check_end()


def test_a_large_payload_is_read_straight_into_the_lent_memory() -> None:
    sink = Sink()
    reader = FrameReader(sink, max_length=MAX_LENGTH)
    stream = encode(0, b"q" * MAX_LENGTH)
    first = reader.buffer()
    first[:HEADER_BYTES] = stream[:HEADER_BYTES]
    reader.advance(HEADER_BYTES)
    place = reader.buffer()
    assert len(place) == MAX_LENGTH
    place[:5] = b"hello"
    assert bytes(sink.lent[0][:5]) == b"hello"


def test_the_reader_owns_no_more_than_its_staging_area() -> None:
    reader = FrameReader(Sink(frozenset({0})), max_length=1 << 40)
    reader.feed(encode_header(FrameHeader(FrameKind.BULK, 0, 1, 2, 0, 0, 1 << 40)))
    for _ in range(100):
        place = reader.buffer()
        assert len(place) <= STAGING_BYTES
        reader.advance(len(place))
    assert not reader.is_between_frames


@settings(max_examples=chosen(25, soak=100), deadline=None)
@given(size=st.integers(1, 100_000), portion=st.floats(0, 0.999), cuts=cut_lists)
def test_a_divert_in_mid_frame_stops_writing_and_keeps_the_next_frame(
    size: int, portion: float, cuts: list[int]
) -> None:
    sink = Sink()
    reader = FrameReader(sink, max_length=MAX_LENGTH)
    stream = encode(0, b"a" * size)
    split = HEADER_BYTES + int(size * portion)
    pour(reader, stream[:split], cuts)
    reader.divert()
    before = bytes(sink.lent[0])
    pour(reader, stream[split:] + encode(1, b"next"), cuts)
    assert bytes(sink.lent[0]) == before
    assert sink.frames == [(1, b"next")]


def test_a_divert_between_buffer_and_advance_counts_the_bytes() -> None:
    sink = Sink()
    reader = FrameReader(sink, max_length=MAX_LENGTH)
    reader.feed(encode_header(FrameHeader(FrameKind.BULK, 0, 1, 2, 0, 0, 2 * DIRECT_BYTES)))
    assert len(reader.buffer()) == 2 * DIRECT_BYTES
    reader.divert()
    reader.advance(2 * DIRECT_BYTES)
    reader.feed(encode(1, b"next"))
    assert sink.frames == [(1, b"next")]


def test_nothing_is_delivered_after_stop_or_after_an_error() -> None:
    sink = Sink()
    reader = FrameReader(sink, max_length=MAX_LENGTH)
    with pytest.raises(ProtocolError):
        reader.feed(encode(0, b"ok") + b"\0" * HEADER_BYTES + encode(1, b"late"))
    reader.feed(encode(2, b"later"))
    place = reader.buffer()
    reader.advance(len(place))
    assert sink.frames == [(0, b"ok")]


def test_a_sink_may_stop_the_reader_while_frames_are_waiting() -> None:
    class Stopping(Sink):
        def landed(self, header: FrameHeader) -> None:
            super().landed(header)
            reader.stop()

    sink = Stopping()
    reader = FrameReader(sink, max_length=MAX_LENGTH)
    reader.feed(encode(0, b"one") + encode(1, b"two"))
    assert sink.frames == [(0, b"one")]


def test_errors_of_the_sink_pass_through() -> None:
    class Refusing(Sink):
        def lend(self, header: FrameHeader) -> memoryview | None:
            raise ProtocolError("not welcome")

    with pytest.raises(ProtocolError, match="not welcome"):
        FrameReader(Refusing(), max_length=MAX_LENGTH).feed(encode(0, b"x"))


class Holding(Sink):
    """Holds its reader when it is asked for the frames in ``late`` for the first time, and behind those in ``last``."""

    def __init__(self, late: frozenset[int], last: frozenset[int]) -> None:
        super().__init__()
        self.late = set(late)
        self.last = last
        self.ended_tags: list[int] = []
        self.reader = FrameReader(self, max_length=MAX_LENGTH, ended=self.ended)

    def lend(self, header: FrameHeader) -> memoryview | None:
        if header.tag in self.late:
            self.late.discard(header.tag)
            self.reader.hold()
            return None
        return super().lend(header)

    def ended(self, header: FrameHeader) -> None:
        self.ended_tags.append(header.tag)
        if header.tag in self.last:
            self.reader.hold()


@settings(max_examples=chosen(20, soak=80), deadline=None)
@given(payloads=payloads, cuts=cut_lists, late=st.frozensets(st.integers(0, 7)), last=st.frozensets(st.integers(0, 7)))
def test_a_held_reader_takes_no_frame_and_loses_none(
    payloads: list[bytes], cuts: list[int], late: frozenset[int], last: frozenset[int]
) -> None:
    sink = Holding(late, last)
    stream = b"".join(encode(tag, payload) for tag, payload in enumerate(payloads))
    position, turn = 0, 0
    while position < len(stream) or sink.reader.is_held:
        if sink.reader.is_held:
            sink.reader.resume()
            continue
        place = sink.reader.buffer()
        count = min(len(place), len(stream) - position, cuts[turn % len(cuts)])
        place[:count] = stream[position : position + count]
        sink.reader.advance(count)
        position, turn = position + count, turn + 1
    assert sink.frames == list(enumerate(payloads))
    assert sink.ended_tags == list(range(len(payloads)))


def test_the_frames_behind_a_held_one_wait() -> None:
    sink = Holding(late=frozenset({1}), last=frozenset())
    pour(sink.reader, encode(0, b"a") + encode(1, b"b") + encode(2, b"c"), [1000])
    assert sink.frames == [(0, b"a")]
    assert not sink.reader.is_between_frames
    assert sink.reader.resume() is True
    assert sink.frames == [(0, b"a"), (1, b"b"), (2, b"c")]
    assert sink.reader.is_between_frames


def test_resuming_says_whether_the_reader_is_held_again() -> None:
    sink = Holding(late=frozenset({0, 1}), last=frozenset())
    pour(sink.reader, encode(0, b"a") + encode(1, b"b"), [1000])
    assert sink.reader.resume() is False
    assert sink.frames == [(0, b"a")]
    assert sink.reader.resume() is True


@settings(max_examples=chosen(20, soak=60), deadline=None)
@given(length=st.integers(0, 200_000), portion=st.floats(0, 1), cuts=cut_lists, is_wanted=st.booleans())
def test_a_share_of_a_payload_is_all_that_comes(length: int, portion: float, cuts: list[int], is_wanted: bool) -> None:
    share = int(length * portion)

    class Sharing(Sink):
        def lend(self, header: FrameHeader) -> memoryview | None:
            if header.tag == 0:
                self.lent.append(memoryview(bytearray(share)))
                return self.lent[-1] if is_wanted else None
            return super().lend(header)

    sink, ended = Sharing(), list[int]()
    reader = FrameReader(
        sink,
        max_length=MAX_LENGTH,
        share=lambda header: share if header.tag == 0 else header.length,
        ended=lambda header: ended.append(header.tag),
    )
    pour(reader, encode(0, bytes(length))[: HEADER_BYTES + share] + encode(1, b"next"), cuts)
    assert sink.frames == [(0, bytes(share))] * is_wanted + [(1, b"next")]
    assert ended == [0, 1]


@settings(max_examples=chosen(20, soak=80), deadline=None)
@given(payloads=payloads, cuts=cut_lists, late=st.frozensets(st.integers(0, 7)), last=st.frozensets(st.integers(0, 7)))
def test_what_a_held_reader_leaves_over_is_given_again(
    payloads: list[bytes], cuts: list[int], late: frozenset[int], last: frozenset[int]
) -> None:
    sink = Holding(late, last)
    stream = b"".join(encode(tag, payload) for tag, payload in enumerate(payloads))
    position, turn = 0, 0
    while position < len(stream):
        count = cuts[turn % len(cuts)]
        left = sink.reader.feed(stream[position : position + count])
        position, turn = position + count, turn + 1
        while sink.reader.is_held:
            sink.reader.resume()
            left = sink.reader.feed(left)
        assert len(left) == 0
    assert sink.frames == list(enumerate(payloads))
    assert sink.ended_tags == list(range(len(payloads)))


class WholeSink(Sink):
    """Takes whole frames with even tags at once."""

    def __init__(self) -> None:
        super().__init__()
        self.accepted: list[tuple[int, bytes]] = []

    def accept(self, header: FrameHeader, payload: memoryview) -> bool:
        if header.tag % 2:
            return False
        self.accepted.append((header.tag, bytes(payload)))
        self.frames.append(self.accepted[-1])
        return True


@ways
@settings(max_examples=chosen(20, soak=80), deadline=None)
@given(payloads=payloads, cuts=cut_lists)
def test_frames_that_are_there_as_a_whole_are_offered_and_all_keep_their_order(  # type: ignore[no-untyped-def]
    give, payloads: list[bytes], cuts: list[int]
) -> None:
    sink = WholeSink()
    reader = FrameReader(sink, max_length=MAX_LENGTH, accept=sink.accept)
    give(reader, b"".join(encode(tag, payload) for tag, payload in enumerate(payloads)), cuts)
    assert sink.frames == list(enumerate(payloads))
    assert reader.is_between_frames


def test_small_frames_in_one_read_are_all_offered() -> None:
    sink = WholeSink()
    reader = FrameReader(sink, max_length=MAX_LENGTH, accept=sink.accept)
    pour(reader, b"".join(encode(2 * tag, b"x" * tag) for tag in range(10)), [STAGING_BYTES])
    assert sink.accepted == [(2 * tag, b"x" * tag) for tag in range(10)]
    assert sink.lent == []
