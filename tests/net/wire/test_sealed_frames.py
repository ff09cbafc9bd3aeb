"""Sealed frames: what arrives is what was sent, in its place, or ``FrameDamaged``."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from asyncpar.net.wire.frame import (
    SEALED_BYTES,
    VOID,
    FrameDamaged,
    FrameHeader,
    FrameKind,
    FrameSealer,
    FrameVerifier,
    Segments,
    encode_header,
)
from asyncpar.net.wire.reader import FrameReader
from asyncpar.net.wire.writer import FrameWriter
from tests.net.wire.test_reader import Sink, feed, pour

SEED = 0x1234_5678
ways = pytest.mark.parametrize("give", [pour, feed])


def sealed(payloads: list[bytes], *, seed: int = SEED, checks: bool = True) -> list[bytes]:
    """Return the frames as they travel, tagged in order."""
    sealer = FrameSealer(seed, checks_payloads=checks)
    frames = []
    for tag, payload in enumerate(payloads):
        head = sealer.seal(encode_header(FrameHeader(FrameKind.BULK, 0, 1, 2, tag, 0, len(payload))))
        writer = FrameWriter()
        writer.push(head, payload, checksum=sealer.begin_payload(head, len(payload)))
        frames.append(b"".join(writer.segments(1 << 30)))
    return frames


def reader(sink: Sink, *, seed: int = SEED, checks: bool = True) -> FrameReader:
    return FrameReader(sink, max_length=1 << 20, verifier=FrameVerifier(seed, checks_payloads=checks))


PAYLOADS = [b"first", b"", random.Random(1).randbytes(20_000), b"x" * 100, b"last"]
FRAMES = sealed(PAYLOADS)


@ways
@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("cuts", [[1], [3, 50], [47, 1, 2], [1 << 20]])
def test_frames_arrive_as_they_were_sent(
    give: Callable[[FrameReader, bytes, list[int]], None], cuts: list[int], checks: bool
) -> None:
    sink = Sink()
    taken = reader(sink, checks=checks)
    give(taken, b"".join(sealed(PAYLOADS, checks=checks)), cuts)
    assert sink.frames == list(enumerate(PAYLOADS))
    assert taken.is_between_frames


@ways
def test_any_bit_that_changes_is_found_before_its_frame_lands(
    give: Callable[[FrameReader, bytes, list[int]], None],
) -> None:
    dice = random.Random(2)
    stream = b"".join(FRAMES)
    places = [*range(8 * 120), *(dice.randrange(8 * len(stream)) for _ in range(400))]
    for place in places:
        changed = bytearray(stream)
        changed[place // 8] ^= 1 << place % 8
        sink, ends, index = Sink(), 0, 0
        while ends <= place // 8:
            ends += len(FRAMES[index])
            index += 1
        with pytest.raises(FrameDamaged, match=f"frame {index - 1}: the checksum of its (header|payload) is wrong"):
            give(reader(sink), bytes(changed), [dice.choice([1000, 9000, 1 << 20])])
        assert sink.frames == list(enumerate(PAYLOADS))[: index - 1]


@pytest.mark.parametrize("order", [[0, 0], [0, 2], [1, 0], [0, 1, 2, 2], [0, 1, 2, 4, 3], [0, 1, 3]], ids=str)
def test_frames_that_come_twice_out_of_order_or_not_at_all_are_found(order: list[int]) -> None:
    sink = Sink()
    with pytest.raises(FrameDamaged, match="was expected, frame"):
        reader(sink).feed(b"".join(FRAMES[index] for index in order))
    assert [tag for tag, _ in sink.frames] == list(range(len(sink.frames)))


def test_frames_of_another_connection_are_not_taken() -> None:
    with pytest.raises(FrameDamaged):
        reader(Sink()).feed(sealed(PAYLOADS, seed=SEED + 1)[0])


def test_payloads_that_are_swapped_with_their_checksums_are_found() -> None:
    one, other = sealed([b"one", b"two"])
    with pytest.raises(FrameDamaged, match="frame 0: the checksum of its payload is wrong"):
        reader(Sink()).feed(one[:SEALED_BYTES] + other[SEALED_BYTES:])


def test_bytes_that_are_left_out_are_found_by_the_frames_behind_them() -> None:
    dice = random.Random(3)
    stream = b"".join(FRAMES)
    for _ in range(300):
        start = dice.randrange(len(stream) - 200)
        left_out = dice.randrange(1, 100)
        sink = Sink()
        with pytest.raises(FrameDamaged):
            reader(sink).feed(stream[:start] + stream[start + left_out :] + b"".join(FRAMES))
        assert sink.frames == list(enumerate(PAYLOADS))[: len(sink.frames)]


def test_a_payload_that_nobody_wants_is_not_checked_and_its_frame_is_counted() -> None:
    sink = Sink(unwanted=frozenset({0}))
    changed = bytearray(FRAMES[0])
    changed[SEALED_BYTES] ^= 1
    reader(sink).feed(bytes(changed) + FRAMES[1])
    assert sink.frames == [(1, b"")]


def test_a_frame_that_was_taken_back_leaves_no_gap() -> None:
    sealer, writer = FrameSealer(SEED, checks_payloads=True), FrameWriter()
    frames = []
    for tag in range(3):
        head = sealer.seal(encode_header(FrameHeader(FrameKind.BULK, 0, 1, 2, tag, 0, 4)))
        void = lambda head=head: sealer.seal_instead(memoryview(head), encode_header(VOID))  # noqa: E731
        checksum = sealer.begin_payload(head, 4)
        frames.append(writer.push(head, b"%04d" % tag, checksum=checksum, void=void))
    assert writer.release(frames[1]) is False
    assert writer.release(frames[1]) is False
    stream = b""
    while writer:
        portion = b"".join(writer.segments(7))
        writer.advance(len(portion))
        stream += portion
    sink = Sink()
    reader(sink).feed(stream)
    assert sink.frames == [(0, b"0000"), (2, b"0002")]


def test_a_payload_in_pieces_that_is_taken_in_portions_and_copied_on_the_way_has_one_checksum() -> None:
    payload = bytearray(random.Random(4).randbytes(3000))
    whole = sealed([bytes(payload)])[0]
    for step in (1, 7, 1000, 3040):
        sealer, writer = FrameSealer(SEED, checks_payloads=True), FrameWriter()
        memory = bytearray(payload)
        head = sealer.seal(encode_header(FrameHeader(FrameKind.BULK, 0, 1, 2, 0, 0, len(payload))))
        pieces = Segments(memoryview(memory)[start : start + 700] for start in range(0, 3000, 700))
        frame = writer.push(head, pieces, checksum=sealer.begin_payload(head, len(payload)))
        stream = b""
        while writer:
            lent = b"".join(writer.segments(2 * step))
            stream += lent[:step]
            writer.advance(min(step, len(lent)))
            if len(stream) > 1500 and not frame.is_released:
                writer.release(frame)
                memory[:] = bytes(len(memory))
        assert stream == whole


def test_numbers_start_again_after_the_largest() -> None:
    sealer, verifier = FrameSealer(SEED), FrameVerifier(SEED)
    sealer._number = verifier._number = 0xFFFF_FFFF  # noqa: SLF001  # the last number of 2**32 is reached at once
    sink = Sink()
    taken = FrameReader(sink, max_length=1, verifier=verifier)
    for tag in range(3):
        taken.feed(sealer.seal(encode_header(FrameHeader(FrameKind.BULK, 0, 1, 2, tag, 0, 0))))
    assert sink.frames == [(0, b""), (1, b""), (2, b"")]
