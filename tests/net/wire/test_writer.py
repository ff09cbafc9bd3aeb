from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpar.net.wire.writer import FrameWriter


def drain(writer: FrameWriter, counts: list[int]) -> bytes:
    """Take everything, in portions of at most ``counts``, repeated."""
    taken, turn = b"", 0
    while writer:
        count = counts[turn % len(counts)]
        portion = b"".join(writer.segments(count))
        assert 0 < len(portion) <= count
        writer.advance(len(portion))
        taken += portion
        turn += 1
    return taken


frames = st.lists(st.tuples(st.binary(min_size=1, max_size=40), st.binary(max_size=100)), max_size=8)
portions = st.lists(st.integers(1, 200), min_size=1, max_size=5)


@settings(deadline=None)
@given(frames=frames, counts=portions)
def test_all_bytes_go_out_in_order_whatever_the_channel_takes(
    frames: list[tuple[bytes, bytes]], counts: list[int]
) -> None:
    writer = FrameWriter()
    written: list[int] = []
    for number, (head, payload) in enumerate(frames):
        writer.push(head, payload, written=lambda number=number: written.append(number))  # type: ignore[misc]
    assert writer.waiting_bytes == sum(len(head) + len(payload) for head, payload in frames)
    assert drain(writer, counts) == b"".join(head + payload for head, payload in frames)
    assert written == list(range(len(frames)))
    assert writer.segments(100) == []


def test_payloads_are_lent_and_not_copied() -> None:
    payload = bytearray(b"before")
    writer = FrameWriter()
    writer.push(b"h", payload)
    payload[:] = b"after!"
    assert b"".join(writer.segments(100)) == b"hafter!"


def test_a_frame_may_be_queued_when_the_channel_has_taken_its_beginning() -> None:
    writer = FrameWriter()
    writer.push(b"head", b"payload", taken=6)
    assert drain(writer, [3]) == b"yload"


@settings(deadline=None)
@given(taken=st.integers(0, 10), counts=portions)
def test_a_released_frame_goes_out_whole_as_it_was_or_not_at_all(taken: int, counts: list[int]) -> None:
    writer = FrameWriter()
    payload = bytearray(b"payload")
    called: list[str] = []
    frame = writer.push(b"head", payload, written=lambda: called.append("written"))
    writer.push(b"NEXT", b"")
    begun = b"".join(writer.segments(taken)) if taken else b""
    writer.advance(len(begun))
    goes_out = writer.release(frame)
    payload[:] = b"XXXXXXX"
    assert goes_out == (taken > 0)
    assert begun + drain(writer, counts) == (b"headpayload" if goes_out else b"") + b"NEXT"
    assert called == []


def test_releasing_a_frame_that_is_written_says_that_it_went_out() -> None:
    writer = FrameWriter()
    frame = writer.push(b"head", b"payload")
    drain(writer, [100])
    assert writer.release(frame) is True
    assert writer.waiting_bytes == 0


def test_a_cleared_writer_gives_everything_back() -> None:
    writer = FrameWriter()
    payload = bytearray(b"payload")
    frame = writer.push(b"head", payload)
    writer.clear()
    payload.extend(b"resizing needs that nobody holds the memory")
    assert not writer
    assert writer.release(frame) is False
    assert writer.waiting_bytes == 0


def test_frames_can_follow_a_dropped_one() -> None:
    writer = FrameWriter()
    writer.release(writer.push(b"head", b"payload"))
    assert not writer
    writer.push(b"next", b"frame", taken=2)
    assert drain(writer, [100]) == b"xtframe"


@settings(deadline=None)
@given(taken=st.integers(0, 10), counts=portions)
def test_a_frame_that_is_kept_goes_out_whole_as_it_was(taken: int, counts: list[int]) -> None:
    writer = FrameWriter()
    payload = bytearray(b"payload")
    called: list[str] = []
    frame = writer.push(b"head", payload, written=lambda: called.append("written"))
    begun = b"".join(writer.segments(taken)) if taken else b""
    writer.advance(len(begun))
    writer.keep(frame)
    payload.extend(b"resizing needs that nobody holds the memory")
    assert begun + drain(writer, counts) == b"headpayload"
    assert called == []
