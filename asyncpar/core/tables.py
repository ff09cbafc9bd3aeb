"""Tables of figures, as aligned text and as HTML for notebooks."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(rows: Sequence[Sequence[str]], *, left: int) -> str:
    """Return ``rows``, headings first, in aligned columns; the first ``left`` columns are left-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if column < left else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Return ``rows``, headings first, as an HTML table; all texts are escaped."""
    from html import escape  # only notebooks show HTML

    head, *body = ["".join(f"<{cell}>{escape(text)}</{cell}>" for text in row) for row, cell in _cells(rows)]
    lines = "".join(f"<tr>{line}</tr>" for line in body)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"


def _cells(rows: Sequence[Sequence[str]]) -> list[tuple[Sequence[str], str]]:
    return [(row, "td" if index else "th") for index, row in enumerate(rows)]


def bytes_text(count: float) -> str:
    """Return a number of bytes with a unit, rounded to three digits."""
    return _scaled(count, ("B", "KB", "MB", "GB", "TB"))


def seconds_text(seconds: float) -> str:
    """Return a time with a unit, rounded to three digits."""
    if not seconds:
        return "0 s"
    unit, factor = next((pair for pair in (("s", 1.0), ("ms", 1e3)) if seconds * pair[1] >= 1.0), ("us", 1e6))
    return f"{seconds * factor:.3g} {unit}"


def _scaled(value: float, units: Sequence[str]) -> str:
    scale = 0
    while abs(value) >= 999.5 and scale + 1 < len(units):
        value /= 1e3
        scale += 1
    return f"{value:.3g} {units[scale]}"
