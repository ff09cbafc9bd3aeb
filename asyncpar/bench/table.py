"""Rows for people, in the columns of nccl-tests, as many as fit.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from asyncpar.bench.report import BenchEnvironment, BenchReport, Measurement

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column(Generic[Row]):
    """A column; ``worth`` determines which are dropped first if there is no room for all: the lowest."""

    title: str
    unit: str
    width: int
    worth: int
    show: Callable[[Row], str]


COLUMNS: tuple[Column[Measurement], ...] = (
    Column(title="size", unit="(B)", width=12, worth=9, show=lambda row: str(row.size)),
    Column(title="count", unit="(elements)", width=12, worth=2, show=lambda row: str(row.count)),
    Column(title="type", unit="", width=9, worth=3, show=lambda row: row.type),
    Column(title="redop", unit="", width=6, worth=1, show=lambda row: row.redop),
    Column(title="root", unit="", width=5, worth=0, show=lambda row: str(row.root)),
    Column(title="time", unit="(us)", width=12, worth=10, show=lambda row: f"{row.time_us:.1f}"),
    Column(title="algbw", unit="(GB/s)", width=8, worth=5, show=lambda row: f"{row.algbw:.2f}"),
    Column(title="busbw", unit="(GB/s)", width=8, worth=7, show=lambda row: f"{row.busbw:.2f}"),
    Column(title="#wrong", unit="", width=7, worth=8, show=lambda row: str(row.wrong)),
    Column(title="predicted", unit="(us)", width=12, worth=4, show=lambda row: f"{row.predicted_us:.1f}"),
    Column(title="algorithm", unit="", width=18, worth=6, show=lambda row: row.algorithm),
)


def choose_columns(columns: Sequence[Column[Row]], width: int | None) -> tuple[Column[Row], ...]:
    """Return the columns that fit into ``width`` characters (None: any number), at least the two of most worth."""
    chosen = sorted(columns, key=lambda column: -column.worth)
    while len(chosen) > 2 and width is not None and sum(column.width for column in chosen) > width:
        chosen.pop()
    return tuple(column for column in columns if column in chosen)


def format_title(surroundings: BenchEnvironment) -> list[str]:
    """Return the lines at the top."""
    hosts = "1 host" if surroundings.hosts == 1 else f"{surroundings.hosts} hosts"
    ranks = "1 rank" if surroundings.ranks == 1 else f"{surroundings.ranks} ranks"
    return [
        f"# asyncpar {surroundings.version}: {ranks}, {hosts}, {surroundings.cores} cores, {surroundings.lane} lanes",
        "# time: median over the iterations on the slowest rank",
    ]


def format_header(operation: str, columns: Sequence[Column[Measurement]]) -> list[str]:
    """Return the lines above the rows of one operation."""
    titles, units = format_titles(columns)
    return [f"# {operation}", f"#{titles[1:]}", f"#{units[1:]}".rstrip()]


def format_titles(columns: Sequence[Column[Row]]) -> tuple[str, str]:
    """Return the line of titles and the line of units."""
    titles = "".join(f"{column.title:>{column.width}}" for column in columns)
    return titles, "".join(f"{column.unit:>{column.width}}" for column in columns).rstrip()


def format_row(row: Row, columns: Sequence[Column[Row]]) -> str:
    """Return one line."""
    return "".join(f"{column.show(row):>{column.width}}" for column in columns)


def format_end(report: BenchReport) -> list[str]:
    """Return the summary below the rows."""
    verdict = "OK" if report.wrong_sizes == 0 else "FAILED"
    lines = [f"# sizes with wrong elements: {report.wrong_sizes} {verdict}"]
    if any(measurement.size for measurement in report.measurements):
        lines.append(f"# mean bus bandwidth: {report.mean_busbw:.3f} GB/s")
    return lines
