"""Tables as text and as HTML, with units."""

from __future__ import annotations

import pytest

from asyncpar.collectives.ledger import Traffic
from asyncpar.core.tables import bytes_text, html_table, seconds_text, text_table
from asyncpar.gradsync import SyncStatistics

ROWS = [("name", "figure"), ("<b>&", "12")]


def test_columns_are_aligned() -> None:
    assert text_table(ROWS, left=1) == "name  figure\n<b>&      12"


def test_texts_are_escaped() -> None:
    expected = (
        "<table><thead><tr><th>name</th><th>figure</th></tr></thead>"
        "<tbody><tr><td>&lt;b&gt;&amp;</td><td>12</td></tr></tbody></table>"
    )
    assert html_table(ROWS) == expected


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 KB"), (25e6, "25 MB"), (1.5e12, "1.5 TB")],
)
def test_bytes_have_units(count: float, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.0, "0 s"), (2.5, "2.5 s"), (0.0123, "12.3 ms"), (4e-6, "4 us")])
def test_times_have_units(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_statistics_are_tables() -> None:
    statistics = SyncStatistics(total_sync_operations=3, bytes_on_wire=25_000_000, average_sync_time_ms=12.345)
    assert "time of a step" in str(statistics)
    assert "12.3 ms" in str(statistics)
    assert "<td>25 MB</td>" in statistics._repr_html_()  # the name that notebooks call
    assert Traffic(operations=())._repr_html_().startswith("<table>")
