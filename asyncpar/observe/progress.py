"""``ap.progress``: the progress of a task, through the launcher, on a terminal, in a notebook, or as plain lines."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, SupportsFloat, TextIO

from asyncpar.core.config.rank_place import find_rank_place
from asyncpar.core.observe.rank_reports import ProgressRecord
from asyncpar.core.observe.reporting import Reporter, process_reporter
from asyncpar.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text


class _Display(ABC):
    """Display of the progress of one task."""

    @abstractmethod
    def show(self, record: ProgressRecord) -> None:
        """Show the progress in ``record``.  All but the last call may be dropped."""

    def close(self) -> None:  # noqa: B027  # few have something to close
        """Leave the last progress on the screen."""


class _Nowhere(_Display):
    def show(self, record: ProgressRecord) -> None:
        pass


class _Bars:
    """The bars of this process: a terminal has one live part, at its bottom, which all tasks share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._records: dict[_Bar, ProgressRecord] = {}

    def open(self, bar: _Bar, stream: TextIO, record: ProgressRecord) -> None:
        """Show ``record`` until ``bar`` is closed."""
        from rich.console import Console
        from rich.live import Live

        with self._lock:
            self._records[bar] = record
            if self._live is None:
                console = Console(file=stream)
                self._live = Live(console=console, get_renderable=partial(self._draw, console))
                self._live.start()

    def show(self, bar: _Bar, record: ProgressRecord) -> None:
        """Show ``record`` instead."""
        with self._lock:
            self._records[bar] = record

    def close(self, bar: _Bar) -> None:
        """Remove the line of ``bar``; the last one stays on the screen."""
        with self._lock:
            live = self._live
            assert live is not None
            if len(self._records) == 1:
                self._live = None
        if self._live is None:
            live.stop()
        else:
            live.refresh()
        del self._records[bar]

    def _draw(self, console: Console) -> Text:
        from rich.text import Text

        from asyncpar.observe.progress_line import drawn_line

        lines = [drawn_line(record, width=console.width - 1) for record in list(self._records.values())]
        return Text("\n").join(Text.from_ansi(line) for line in lines)


_bars: Final = _Bars()


class _Bar(_Display):
    def __init__(self, stream: TextIO, record: ProgressRecord) -> None:
        _bars.open(self, stream, record)

    def show(self, record: ProgressRecord) -> None:
        _bars.show(self, record)

    def close(self) -> None:
        _bars.close(self)


class _Lines(_Display):
    """Plain lines, at most one a second, and the last."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._clock = clock
        self._next = clock()
        self._left: ProgressRecord | None = None

    def show(self, record: ProgressRecord) -> None:
        self._left = record
        now = self._clock()
        if now >= self._next:
            self._next = now + 1.0
            self.close()

    def close(self) -> None:
        from asyncpar.observe.progress_line import chosen_width, plain_line

        if self._left is not None:
            self._stream.write(plain_line(self._left, width=chosen_width()) + "\n")
            self._stream.flush()
            self._left = None


class Progress:
    """Progress of one task; made by ``progress``.  Its methods are thread-safe."""

    def __init__(self, display: _Display, reporter: Reporter, description: str, total: float | None) -> None:
        self._display = display
        self._reporter = reporter
        self._description = description
        self._total = total
        self._completed = 0.0

    @property
    def completed(self) -> float:
        """Number of steps that are done."""
        return self._completed

    def advance(self, steps: SupportsFloat = 1, **figures: object) -> None:
        """Count ``steps`` more, and show ``figures`` with them; numbers get four digits.

        Raises ``UsageError`` unless ``steps`` is a finite number.
        """
        self.show(self._completed + _checked("steps", steps), **figures)

    def show(self, completed: SupportsFloat, **figures: object) -> None:
        """Show that ``completed`` steps are done, with ``figures``; numbers get four digits.

        Raises ``UsageError`` unless ``completed`` is a finite number, 0 or more.
        """
        self._completed = _checked("completed", completed)
        fields = {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in figures.items()}
        self._reporter.progress(
            description=self._description, completed=self._completed, total=self._total, fields=fields
        )
        self._display.show(ProgressRecord(self._description, self._completed, self._total, fields))


@contextmanager
def progress(description: str, total: SupportsFloat | None = None) -> Iterator[Progress]:
    """Show the progress of the block: ``with ap.progress("train", total=100) as bar: ... bar.advance(loss=loss)``.

    Under ``asyncpar launch``, and in jobs of engines, all ranks may have one: the launcher shows that of the lowest
    rank with one.  Where another launcher started the ranks, the first rank shows it.  A terminal or a notebook gets a
    bar, anything else a plain line a second, on stderr, no wider than the variable ``COLUMNS`` says if it is set.
    ``total`` None means that the number of steps is unknown.

    Raises ``UsageError`` unless ``total`` is positive.
    """
    if not description:
        raise UsageError("description: expected a text, got none")
    steps = None if total is None else _checked("total", total)
    if steps == 0.0:
        raise UsageError("total: expected a positive number of steps, got 0; None if nobody knows it")
    reporter = process_reporter()
    display = _Nowhere() if reporter.is_connected else _display(ProgressRecord(description, 0.0, steps))
    try:
        yield Progress(display, reporter, description, steps)
    finally:
        display.close()


def _display(
    record: ProgressRecord, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
) -> _Display:
    """Return the display of progress without a launcher of ours, on ``stream`` (default: stderr)."""
    if stream is None:
        stream = _stderr()
    if stream is None or not _is_first_rank():
        return _Nowhere()
    return _Bar(stream, record) if stream.isatty() or is_notebook() else _Lines(stream, clock)


def _stderr() -> TextIO | None:  # programs without a console have none
    return sys.stderr


def _is_first_rank() -> bool:
    place = find_rank_place(os.environ)
    rank = os.environ.get("RANK", "0") if place is None else str(place.rank)
    return rank == "0"


def is_notebook() -> bool:
    """Return whether this process runs the cells of a notebook."""
    shell = sys.modules.get("IPython")
    return shell is not None and type(shell.get_ipython()).__name__ == "ZMQInteractiveShell"


def _checked(name: str, value: SupportsFloat) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name}: expected a number of steps, got {value!r}") from error
    if not math.isfinite(number) or number < 0.0:
        raise UsageError(f"{name}: expected a finite number of steps, 0 or more, got {value!r}")
    return number
