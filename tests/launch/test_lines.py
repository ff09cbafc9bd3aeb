"""Cutting bytes into lines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncpar.launch.display import LineSplitter


def split(chunks: list[bytes], *, limit: int = 1 << 16) -> list[bytes]:
    splitter = LineSplitter(limit=limit)
    return [line for chunk in chunks for line in splitter.feed(chunk)] + splitter.finish()


def test_every_kind_of_line_end_counts_once() -> None:
    assert split([b"a\nb\r\nc\rd\n\ne"]) == [b"a", b"b", b"c", b"d", b"", b"e"]


def test_a_line_end_cut_in_two_is_one() -> None:
    assert split([b"a\r", b"\nb\r", b"c\r", b"", b"\n"]) == [b"a", b"b", b"c"]


def test_a_long_line_comes_in_pieces() -> None:
    assert split([b"x" * 7, b"x" * 4 + b"\nyy\n"], limit=5) == [b"x" * 5, b"x" * 5, b"x", b"yy"]


@given(st.lists(st.binary(max_size=8).map(lambda piece: piece.replace(b"z", b"\n"))), st.integers(1, 9))
def test_nothing_but_line_ends_is_lost_and_nothing_grows(chunks: list[bytes], limit: int) -> None:
    lines = split(chunks, limit=limit)
    whole = b"".join(chunks)
    assert b"".join(lines) == whole.replace(b"\r", b"").replace(b"\n", b"")
    assert all(len(line) <= limit for line in lines)


@given(st.binary(max_size=30), st.integers(0, 30))
def test_where_the_stream_is_cut_does_not_matter(stream: bytes, at: int) -> None:
    text = stream.replace(b"a", b"\r").replace(b"b", b"\n").replace(b"c", b"\r\n")
    assert split([text[:at], text[at:]]) == split([text])
