"""Time series for the page, within bounded memory whatever the number of ranks.  Pure.

A column of the heat strip is a second, a row a rank, or several ranks if there are more than ``MOST_ROWS``: then their
worst state is shown.  Old columns are thinned out instead of dropped: when the strip is full, each pair of columns
becomes one, and a column is twice as long from then on, so the strip always shows the whole job.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from asyncpar.dashboard.states import RankActivity
from asyncpar.observe.summary import JobSummary

MOST_ROWS: Final = 128
MOST_COLUMNS: Final = 240
MOST_SERIES: Final = 24
_BYTE_SERIES: Final = ("arena", "messages")


class Series:
    """Numbers over time, thinned out like the heat strip."""

    def __init__(self) -> None:
        self.points: list[float | None] = []
        self._sum = 0.0
        self._count = 0

    def add(self, value: float | None) -> None:
        """Add a value to the current column."""
        if value is not None and math.isfinite(value):
            self._sum, self._count = self._sum + value, self._count + 1

    def close(self) -> None:
        """End the current column."""
        self.points.append(self._sum / self._count if self._count else None)
        self._sum, self._count = 0.0, 0

    def thin(self) -> None:
        """Merge each pair of columns into one."""
        pairs = zip(self.points[::2], self.points[1::2], strict=True)
        self.points = [_mean(first, second) for first, second in pairs]


def _mean(first: float | None, second: float | None) -> float | None:
    return second if first is None else first if second is None else (first + second) / 2


class History:
    """The columns so far.  ``take`` one job summary after the other."""

    def __init__(self, *, columns: int = MOST_COLUMNS, rows: int = MOST_ROWS) -> None:
        if columns < 2 or columns % 2:
            raise ValueError(f"columns: expected an even number of at least 2, got {columns}")
        self._most_columns, self._most_rows = columns, rows
        self._stride = 1  # samples in a column
        self._open = 0  # samples in the current column
        self._column = bytearray()
        self.columns: list[bytes] = []
        self.times: list[float] = []
        self.ranks_per_row = 1
        self.series: dict[str, Series] = {"steps/s": Series()}
        self._before: JobSummary | None = None
        self._step: tuple[float, float] | None = None

    def take(self, job: JobSummary, states: Mapping[int, RankActivity]) -> None:
        """Add the summary of about one second."""
        self._spread(max(job.world_size, 1 + max(states, default=-1)))  # a lost rank may have a lower number
        for rank, state in states.items():
            row = rank // self.ranks_per_row
            self._column[row] = max(self._column[row], state)
        for name, value in self._figures(job).items():
            if name in self.series or len(self.series) < MOST_SERIES:
                series = self.series.setdefault(name, self._new_series())
                series.add(value)
        self._before = job
        self._open += 1
        if self._open >= self._stride:
            self._close(job.time)

    def _new_series(self) -> Series:
        series = Series()
        series.points = [None] * len(self.columns)
        return series

    def _spread(self, ranks: int) -> None:
        """Make rows for ``ranks``; ranks that share a row keep what was shown in it."""
        while -(-ranks // self.ranks_per_row) > self._most_rows:
            self.ranks_per_row *= 2
            self.columns = [_fold(column) for column in self.columns]
            self._column = bytearray(_fold(self._column))
        rows = -(-ranks // self.ranks_per_row)
        self._column.extend(bytes(max(0, rows - len(self._column))))

    def _close(self, time: float) -> None:
        self.columns.append(bytes(self._column))
        self.times.append(time)
        self._column, self._open = bytearray(), 0
        for series in self.series.values():
            series.close()
        if len(self.columns) >= self._most_columns:
            pairs = zip(self.columns[::2], self.columns[1::2], strict=True)
            self.columns = [_worse(first, second) for first, second in pairs]
            self.times = self.times[1::2]
            self._stride *= 2
            for series in self.series.values():
                series.thin()

    def _figures(self, job: JobSummary) -> dict[str, float | None]:
        """Return the values of all series."""
        figures: dict[str, float | None] = {"steps/s": self._steps_per_second(job)}
        before = self._before
        for kind in _BYTE_SERIES:
            moved = _moved(job, kind)
            passed = 0.0 if before is None else job.time - before.time
            figures[f"{kind} MB/s"] = (
                max(0.0, moved - _moved(before, kind)) / passed / 1e6 if before is not None and passed > 0.0 else None
            )
        used = [host.memory.used / host.memory.limit for host in job.hosts if host.memory is not None]
        if used:
            figures["memory %"] = 100.0 * max(used)
        for report in job.ranks:
            if report.summary is not None and report.summary.values:
                figures |= dict(report.summary.values)
                break
        return figures

    def _steps_per_second(self, job: JobSummary) -> float | None:
        """Return the speed by the progress of the lowest rank that reports any; None if it is not known."""
        for report in job.ranks:
            if report.summary is not None and report.summary.progress is not None:
                at, completed = report.summary.time, report.summary.progress.completed
                before, self._step = self._step, (at, completed)
                if before is None or at <= before[0] or completed < before[1]:
                    return None
                return (completed - before[1]) / (at - before[0])
        return None


def _moved(job: JobSummary, kind: str) -> float:
    return sum(report.summary.bytes_moved.get(kind, 0) for report in job.ranks if report.summary is not None)


def _fold(column: bytes | bytearray) -> bytes:
    """Return ``column`` with each two rows merged into one."""
    return bytes(max(column[row : row + 2]) for row in range(0, len(column), 2))


def _worse(first: bytes, second: bytes) -> bytes:
    rows = max(len(first), len(second))
    return bytes(map(max, first.ljust(rows, b"\0"), second.ljust(rows, b"\0")))
