"""Output and progress of ranks on the caller's streams."""

from __future__ import annotations

import io
import sys

import pytest

from asyncpar.core.observe.rank_reports import ProgressRecord
from asyncpar.engines.interface import PlaceOutput, PlaceProgress
from asyncpar.engines.output import PlaceMessages, StreamConsole


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def follow(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> str:
    """Return what a console writes of two ranks; both streams are one."""
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    console = StreamConsole()
    for completed, loss in ((1.0, "0.5000"), (2.0, "0.4")):
        console.progress(PlaceProgress("", ProgressRecord("train", completed, 4.0, {"loss": loss})))
    console.output(PlaceOutput(b"rank 0 says hello\n", False))
    console.output(PlaceOutput(b"rank 1 complains\n", True))
    console.progress(PlaceProgress("", ProgressRecord("train", 4.0, 4.0, {})))
    console.close()
    return stream.getvalue()


def test_progress_is_one_line_of_a_terminal_and_output_is_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert follow(monkeypatch, Terminal()) == (
        "\rtrain 1/4 (25%) loss=0.5000\rtrain 2/4 (50%) loss=0.4   \n"
        "rank 0 says hello\nrank 1 complains\n\rtrain 4/4 (100%)\n"
    )


def test_a_line_of_progress_is_cut_where_the_terminal_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "11")
    assert "\rtrain 1/4 \rtrain 2/4 \n" in follow(monkeypatch, Terminal())


def test_progress_is_lines_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert follow(monkeypatch, io.StringIO()) == (
        "train 1/4 (25%) loss=0.5000\ntrain 2/4 (50%) loss=0.4\nrank 0 says hello\nrank 1 complains\ntrain 4/4 (100%)\n"
    )


def test_a_message_of_all_agents_is_shown_once_and_again_when_it_is_repeated() -> None:
    messages = PlaceMessages()
    text = PlaceOutput(b"asyncpar launch: rank 3 exited with code 1; stopping all ranks\n", True, True)
    other = PlaceOutput(b"asyncpar launch: all ranks start again\n", True, True)
    sent = [(place, one) for one in (text, other, text) for place in (2, 0, 1)]
    assert [place for place, one in sent if messages.is_new(place, one)] == [2, 2, 2]


def test_what_ranks_print_is_all_shown_and_old_messages_are_forgotten() -> None:
    messages = PlaceMessages()
    output = PlaceOutput(b"hello\n", True)
    assert all(messages.is_new(place, output) for place in (0, 1, 0))
    first = PlaceOutput(b"0\n", True, True)
    assert messages.is_new(0, first)
    for number in range(1, 1000):
        assert messages.is_new(0, PlaceOutput(b"%d\n" % number, True, True))
    assert messages.is_new(1, first), "a thousand messages later"
