"""Progress of a rank, in one line of any width."""

from __future__ import annotations

import pytest
from rich.cells import cell_len
from rich.text import Text

from asyncpar.core.observe.rank_reports import ProgressRecord
from asyncpar.observe.progress_line import chosen_width, drawn_line, plain_line

RECORD = ProgressRecord(description="train", completed=12.0, total=300.0, fields={"loss": "2.31", "speed": "1.2 MB/s"})


def test_the_plain_line_says_it_all() -> None:
    assert plain_line(RECORD) == "train 12/300 (4%) loss=2.31 speed=1.2 MB/s"


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (80, "train 12/300 (4%) loss=2.31 speed=1.2 MB/s"),
        (41, "train 12/300 (4%) loss=2.31"),
        (27, "train 12/300 (4%) loss=2.31"),
        (26, "train 12/300 (4%)"),
        (1, "train 12/300 (4%)"),
    ],
)
def test_a_plain_line_leaves_out_the_last_fields(width: int, line: str) -> None:
    assert plain_line(RECORD, width=width) == line


@pytest.mark.parametrize(
    ("text", "width"), [("60", 60), ("0", None), ("", None), ("wide", None), ("-3", None), ("²", None)]
)
def test_the_width_is_that_of_the_variable(monkeypatch: pytest.MonkeyPatch, text: str, width: int | None) -> None:
    monkeypatch.setenv("COLUMNS", text)
    assert chosen_width() == width


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (ProgressRecord(description="load", completed=3.0), "load 3"),
        (ProgressRecord(description="load", completed=0.5, total=0.0), "load 0.5/0"),
        (ProgressRecord(description="load", completed=9.0, total=3.0), "load 9/3 (100%)"),
    ],
)
def test_unknown_and_odd_totals_do_no_harm(record: ProgressRecord, line: str) -> None:
    assert plain_line(record) == line


def visible(line: str) -> str:
    return Text.from_ansi(line).plain


def test_a_wide_terminal_gets_a_bar() -> None:
    line = visible(drawn_line(RECORD, width=100))
    assert line.startswith("train ")
    assert "━" in line
    assert line.endswith("12/300    4%  loss 2.31  speed 1.2 MB/s")


@pytest.mark.parametrize("width", [1, 2, 5, 10, 20, 40, 41, 60, 79, 200])
def test_the_line_fits_any_width(width: int) -> None:
    wide = ProgressRecord(description="学習 [bold]x", completed=1.0, total=2.0, fields={"損失": "１.０"})
    for record in (RECORD, wide):
        line = drawn_line(record, width=width)
        assert "\n" not in line
        assert cell_len(visible(line)) <= width


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (39, "train 12/300    4%  loss 2.31"),
        (29, "train 12/300    4%  loss 2.31"),
        (28, "train 12/300    4%"),
        (40, "train 12/300    4%  loss 2.31"),
        (46, "train 12/300    4%  loss 2.31  speed 1.2 MB/s"),
    ],
)
def test_a_field_is_shown_whole_or_not_at_all(width: int, line: str) -> None:
    assert visible(drawn_line(RECORD, width=width)) == line
