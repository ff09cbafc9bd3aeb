"""Segments read like the bytes that they are made of."""

from __future__ import annotations

import pytest

from asyncpar.net.wire.frame import Segments, views_of, write_payload

PARTS = (b"abc", b"", b"defgh", b"i")
WHOLE = b"".join(PARTS)


def segments() -> Segments:
    return Segments(map(memoryview, PARTS))


def test_they_are_as_long_as_their_parts_together_and_say_the_same() -> None:
    assert len(segments()) == len(WHOLE)
    assert bytes(segments()) == WHOLE
    assert [bytes(view) for view in segments().views] == [b"abc", b"defgh", b"i"]


@pytest.mark.parametrize("start", range(len(WHOLE) + 2))
def test_every_slice_is_that_of_the_whole(start: int) -> None:
    for stop in range(len(WHOLE) + 2):
        assert bytes(segments()[start:stop]) == WHOLE[start:stop]
        assert len(segments()[start:stop]) == len(WHOLE[start:stop])
    assert bytes(segments()[start:]) == WHOLE[start:]
    assert bytes(segments()[:start]) == WHOLE[:start]


def test_slices_hold_the_memory_itself() -> None:
    memory = bytearray(b"0123456789")
    cut = Segments([memoryview(memory)[:5], memoryview(memory)[5:]])[3:7]
    memory[:] = b"abcdefghij"
    assert bytes(cut) == b"defg"


def test_payloads_of_both_kinds_are_written_and_seen_in_pieces() -> None:
    for payload in (memoryview(WHOLE), segments()):
        memory = bytearray(len(WHOLE))
        write_payload(payload, memoryview(memory))
        assert memory == WHOLE
        assert b"".join(views_of(payload)) == WHOLE
