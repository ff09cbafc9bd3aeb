"""Progress that people watch: through the launcher, on a terminal, or as plain lines."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from asyncpar.core.observe.reporting import Reporter


class Progress(ABC):
    """Shows how far a task with a known number of steps is."""

    @abstractmethod
    def show(self, completed: int, fields: Mapping[str, str]) -> None:
        """Show that ``completed`` steps are done, and short figures beside it.  All but the last may be dropped."""


class _Silent(Progress):
    """Shows nothing."""

    def show(self, completed: int, fields: Mapping[str, str]) -> None:
        pass


class _Reported(Progress):
    """Leaves the showing to the launcher."""

    def __init__(self, reporter: Reporter, *, description: str, total: int) -> None:
        self._reporter = reporter
        self._description = description
        self._total = total

    def show(self, completed: int, fields: Mapping[str, str]) -> None:
        self._reporter.progress(
            description=self._description, completed=completed, total=self._total, fields=dict(fields)
        )


class _Bar(Progress):
    """A bar on a terminal."""

    def __init__(self, progress: RichProgress, *, description: str, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task(description, total=total, figures="")

    def show(self, completed: int, fields: Mapping[str, str]) -> None:
        self._progress.update(self._task, completed=completed, figures=_join(fields))


class _Lines(Progress):
    """Plain lines, one per second at most, and the last."""

    def __init__(self, stream: TextIO, *, description: str, total: int, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._description = description
        self._total = total
        self._clock = clock
        self._next = clock()

    def show(self, completed: int, fields: Mapping[str, str]) -> None:
        now = self._clock()
        if now < self._next and completed < self._total:
            return
        self._next = now + 1.0
        line = f"{self._description} {completed}/{self._total}  {_join(fields)}\n"
        self._stream.write(line)
        self._stream.flush()


@contextmanager
def open_progress(
    *,
    description: str,
    total: int,
    reporter: Reporter,
    is_watched: bool = True,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Progress]:
    """Yield the progress display that fits: nothing for ranks that are not watched, the launcher's where there is one,
    a bar when ``stream`` (default: stderr) is a terminal, else plain lines.
    """
    stream = stream or sys.stderr
    if not is_watched:
        yield _Silent()
    elif reporter.is_connected:
        yield _Reported(reporter, description=description, total=total)
    elif stream.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn())
        figures = (TextColumn("{task.fields[figures]}"), TimeRemainingColumn())
        with RichProgress(*columns, *figures, console=Console(file=stream)) as progress:
            yield _Bar(progress, description=description, total=total)
    else:
        yield _Lines(stream, description=description, total=total, clock=clock)


def _join(fields: Mapping[str, str]) -> str:
    return "  ".join(f"{name} {value}" for name, value in fields.items())
