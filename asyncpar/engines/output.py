"""Output and progress of ranks at the caller: its own streams, which may be those of a notebook."""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from typing import TextIO

from asyncpar.engines.interface import PlaceOutput, PlaceProgress
from asyncpar.observe.progress_line import plain_line


class Console(ABC):
    """Takes what ranks print and how far they are."""

    @abstractmethod
    def output(self, output: PlaceOutput) -> None:
        """Take a piece of output."""

    @abstractmethod
    def progress(self, progress: PlaceProgress) -> None:
        """Take the latest progress."""

    def close(self) -> None:  # noqa: B027  # few have something to close
        """Take nothing more."""


class StreamConsole(Console):
    """Writes to ``sys.stdout`` and ``sys.stderr`` as they are at each moment; one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def output(self, output: PlaceOutput) -> None:
        self._write(sys.stderr if output.is_error else sys.stdout, output.text.decode(errors="replace"))

    def progress(self, progress: PlaceProgress) -> None:
        self._write(sys.stderr, f"{progress.prefix}{plain_line(progress.record)}\n")

    def _write(self, stream: TextIO | None, text: str) -> None:
        if stream is not None:  # as in programs without a console
            with self._lock:
                stream.write(text)
                stream.flush()
