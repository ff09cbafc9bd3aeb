"""Tables in Markdown, and how sizes, times and ratios are written in them.  Pure."""

from __future__ import annotations

from collections.abc import Sequence

_KB, _MB = 1_000, 1_000_000


def format_size(size: int) -> str:
    """Return ``4 B``, ``64 KiB``, ``25 MB``."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB"), (_MB, "MB"), (_KB, "KB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B" if size < 10 * _KB else f"{size / _MB:.3g} MB"


def format_time(seconds: float | None) -> str:
    """Return microseconds with three digits or more, ``-`` for none."""
    if seconds is None:
        return "-"
    micros = seconds * 1e6
    return f"{micros:.2f}" if micros < 10 else f"{micros:.1f}" if micros < 100 else f"{micros:.0f}"


def format_ratio(ratio: float | None) -> str:
    """Return it with two digits or more, ``-`` for none."""
    if ratio is None:
        return "-"
    return f"{ratio:.3f}x" if ratio < 0.1 else f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.0f}x"


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows, the first of which are titles, as an aligned table; columns but the first to the right."""
    widths = [max(3, *(len(row[column]) for row in rows)) for column in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        return f"| {' | '.join(cells)} |"

    marks = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return [line(rows[0]), f"| {' | '.join(marks)} |", *map(line, rows[1:])]
