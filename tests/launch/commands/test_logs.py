"""`asyncpar logs` shows the last lines of ranks, bounded."""

from __future__ import annotations

from asyncpar.launch.commands.logs import last_lines, show_logs
from asyncpar.launch.rank_output import RECENT_BYTES, RecentOutput
from asyncpar.observe.summary import RankAnswer


def test_the_last_lines_of_each_rank() -> None:
    answers = [
        RankAnswer(rank=0, host="a", content=b"one\ntwo\nthree\n"),
        RankAnswer(rank=1, host="b", error="there is none"),
    ]
    assert show_logs(answers, 2) == "[a:0] two\n[a:0] three\n[b:1] (nothing was printed)\n"
    assert last_lines(RankAnswer(rank=0, host="a", content=b"\xff\n"), 5) == ["\ufffd"]


def test_recent_output_is_bounded_and_begins_with_a_line() -> None:
    recent = RecentOutput()
    assert recent.read() == b""
    recent.write(b"first\n")
    assert recent.read() == b"first\n"
    for number in range(100_000):
        recent.write(b"%d\n" % number)
    content = recent.read()
    assert len(content) <= RECENT_BYTES
    assert content.endswith(b"\n99999\n")
    lines = content.splitlines()
    assert [int(line) for line in lines] == list(range(100_000 - len(lines), 100_000))
    recent.write(b"x" * (10 * RECENT_BYTES))
    assert len(recent.read()) <= RECENT_BYTES
