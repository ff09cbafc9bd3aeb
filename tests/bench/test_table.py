"""Rows on terminals of any width."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncpar.bench.report import BenchReport
from asyncpar.bench.table import COLUMNS, choose_columns, format_end, format_header, format_row, format_title
from tests.bench.samples import ROW, SURROUNDINGS


def test_without_a_terminal_all_columns_are_there() -> None:
    assert choose_columns(COLUMNS, None) == COLUMNS
    assert choose_columns(COLUMNS, 1000) == COLUMNS


@pytest.mark.parametrize("width", [24, 30, 40, 60, 80, 100])
def test_rows_fit_the_width(width: int) -> None:
    columns = choose_columns(COLUMNS, width)
    lines = [*format_header("all_reduce", columns), format_row(ROW, columns)]
    assert max(map(len, lines)) <= width


def test_the_least_interesting_columns_go_first() -> None:
    titles = [[column.title for column in choose_columns(COLUMNS, width)] for width in (1, 24, 40, 80)]
    assert titles[0] == titles[1] == ["size", "time"]
    assert titles[2] == ["size", "time", "busbw", "#wrong"]
    assert titles[3] == ["size", "time", "algbw", "busbw", "#wrong", "predicted", "algorithm"]


def test_a_row_shows_what_was_measured() -> None:
    shown = format_row(ROW, COLUMNS).split()
    assert shown == ["1000", "250", "float32", "sum", "-1", "10.0", "0.10", "0.15", "0", "8.0", "ring"]


def test_titles_stand_above_their_columns() -> None:
    _, titles, units = format_header("all_reduce", COLUMNS)
    row = format_row(ROW, COLUMNS)
    end = 0
    for column in COLUMNS:
        end += column.width
        assert titles[:end].endswith(column.title)
        assert units.ljust(len(row))[:end].endswith(column.unit)
    assert len(row) == end


def test_the_surroundings_are_reported_once() -> None:
    assert format_title(SURROUNDINGS)[0] == "# asyncpar 1: 4 ranks, 1 host, 2 cores, tcp lanes"
    assert "1 rank, 2 hosts" in format_title(replace(SURROUNDINGS, ranks=1, hosts=2))[0]


def test_the_end_says_whether_all_is_right() -> None:
    good = BenchReport(surroundings=SURROUNDINGS, measurements=(ROW,))
    bad = replace(good, measurements=(ROW, replace(ROW, wrong=1)))
    barrier = replace(good, measurements=(replace(ROW, size=0),))
    assert format_end(good) == ["# sizes with wrong elements: 0 OK", "# mean bus bandwidth: 0.150 GB/s"]
    assert format_end(bad)[0] == "# sizes with wrong elements: 1 FAILED"
    assert format_end(barrier) == ["# sizes with wrong elements: 0 OK"]
