"""The last lines of output."""

from __future__ import annotations

from asyncpar.dashboard.log_tail import LONGEST_LINE, MOST_LINES, LogTail


def texts(tail: LogTail) -> list[tuple[int | None, str]]:
    return [(line["rank"], line["text"]) for line in tail.after(0)]


def test_lines_come_whole_however_they_were_written() -> None:
    tail = LogTail()
    for rank, chunk in ((0, b"one\ntw"), (1, b"other\n"), (0, b"o\n"), (0, b"three"), (0, b"")):
        tail.feed(chunk, rank=rank)

    assert texts(tail) == [(0, "one"), (1, "other"), (0, "two"), (0, "three")]


def test_of_a_bar_that_is_drawn_again_the_last_is_shown() -> None:
    tail = LogTail()
    tail.feed(b"1%\r2%\r3%\r\n", rank=0)

    assert texts(tail) == [(0, "3%")]


def test_it_is_bounded_in_lines_and_in_their_length() -> None:
    tail = LogTail()
    for _ in range(3):
        tail.feed(b"x" * 10_000 + b"\n" + b"y\n" * MOST_LINES, rank=0)
    tail.feed(b"z" * 1_000_000, rank=1)
    tail.feed(b"z" * 1_000_000, rank=1)
    tail.feed(b"", rank=1)

    assert len(tail.after(0)) == MOST_LINES
    assert max(len(text) for _, text in texts(tail)) == LONGEST_LINE
    assert tail.after(0)[-1]["n"] == 3 * (MOST_LINES) + 1
