"""Progress in one line: plain, or with a bar for a terminal of any width."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

from asyncpar.core.observe.rank_reports import ProgressRecord

if TYPE_CHECKING:
    from rich.table import Table

_WIDEST_BAR = 30
_NARROWEST_BAR = 5


def plain_line(record: ProgressRecord, *, width: int | None = None) -> str:
    """Format progress as ``train 12/300 (4%) loss=2.31``; the last fields are left out beyond ``width`` characters."""
    parts = [record.description, _amount(record)]
    share = _share(record)
    if share is not None:
        parts.append(f"({share:.0%})")
    line = " ".join(filter(None, parts))
    for name, value in record.fields.items():
        longer = f"{line} {name}={value}"
        if width is not None and len(longer) > width:
            break
        line = longer
    return line


def chosen_width() -> int | None:
    """Return the width that the user has chosen for lines by the variable ``COLUMNS``, None if there is none."""
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isascii() and text.isdecimal() and int(text) else None


def drawn_line(record: ProgressRecord, *, width: int) -> str:
    """Format progress as one line with a bar and colours, at most ``width`` cells wide, without a line end.

    The bar shrinks first, then disappears; then fields are left out, the last first, and the description is cut.  The
    rest is truncated at the right.
    """
    from rich.cells import cell_len, set_cell_size  # rich takes long to import, and only bars need it
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    share = _share(record)
    amount = _amount(record) + ("" if share is None else f"  {share:4.0%}")
    texts = [f"{name} {value}" for name, value in record.fields.items()]
    while texts and cell_len("  ".join([f"{record.description} {amount}", *texts])) > width:
        texts.pop()
    description = record.description
    if cell_len(description) + len(amount) >= width:
        description = f"{set_cell_size(description, max(1, width - len(amount) - 2)).rstrip()}…"
    fields = "  ".join(texts)
    room = width - cell_len(description) - len(amount) - cell_len(fields) - 6
    bar_width = min(_WIDEST_BAR, room)
    line = Table.grid(padding=(0, 1), expand=False)
    cells: list[Text | ProgressBar] = [Text(description, style="bold")]
    if share is not None and bar_width >= _NARROWEST_BAR and len(texts) == len(record.fields):
        cells.append(ProgressBar(total=1.0, completed=share, width=bar_width))
        cells.append(Text(f"{amount}  {fields}".rstrip()))
    else:
        cells = [Text(f"{description} {amount}  {fields}".rstrip())]
    for _ in cells:
        line.add_column(no_wrap=True, overflow="crop")
    line.add_row(*cells)
    return _render(line, width=max(1, width))


def _render(renderable: Table, *, width: int) -> str:
    """Render with rich into a string, first line only."""
    from rich.console import Console

    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, color_system="256", legacy_windows=False)
    console.print(renderable, no_wrap=True, overflow="crop", crop=True)
    return file.getvalue().split("\n", 1)[0].rstrip()


def _amount(record: ProgressRecord) -> str:
    return _number(record.completed) + ("" if record.total is None else f"/{_number(record.total)}")


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() else f"{value:.4g}"


def _share(record: ProgressRecord) -> float | None:
    """Return the finished share, 0 to 1, None if it is unknown."""
    if record.total is None or not record.total > 0.0:
        return None
    return min(1.0, max(0.0, record.completed / record.total))
