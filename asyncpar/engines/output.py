"""Output and progress of ranks at the caller: written to its own streams, which may be those of a notebook."""

from __future__ import annotations

import shutil
import sys
import threading
from abc import ABC, abstractmethod
from typing import Final, TextIO

from asyncpar.engines.interface import PlaceOutput, PlaceProgress
from asyncpar.harmless import HarmlessStream, harmless_bytes, harmless_line
from asyncpar.observe.progress import is_notebook
from asyncpar.observe.progress_line import plain_line

_REMEMBERED_MESSAGES: Final = 256


class Console(ABC):
    """Takes the output and the progress of ranks."""

    @abstractmethod
    def output(self, output: PlaceOutput) -> None:
        """Take a piece of output."""

    @abstractmethod
    def progress(self, progress: PlaceProgress) -> None:
        """Take the latest progress."""

    def close(self) -> None:  # noqa: B027  # few have something to close
        """Ignore further output."""


class PlaceMessages:
    """Decides which messages of the agents of a job are shown: a message that all of them send is shown once."""

    def __init__(self) -> None:
        self._senders: dict[bytes, set[int]] = {}
        """By text, the latest last: the places whose agents have sent it since it was shown."""

    def is_new(self, place: int, output: PlaceOutput) -> bool:
        """Return whether to show ``output``: it is no message, no other place has sent it, or this place repeats it."""
        if not output.is_message:
            return True
        places = self._senders.pop(output.text, set())
        is_new = not places or place in places
        self._senders[output.text] = {place} if is_new else places | {place}
        if len(self._senders) > _REMEMBERED_MESSAGES:
            del self._senders[next(iter(self._senders))]
        return is_new


class StreamConsole(Console):
    """Writes to the current ``sys.stdout`` and ``sys.stderr``; one thread at a time.

    On a terminal and in a notebook progress is one line, which the next one replaces; elsewhere each is a line.
    Control sequences that ranks print have no effect there, except colours.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown = ""
        self._stdout = HarmlessStream(colors=True)

    def output(self, output: PlaceOutput) -> None:
        with self._lock:
            self._end_line()
            if output.is_error:
                _write(sys.stderr, harmless_bytes(output.text, colors=_is_screen(sys.stderr)).decode())
            else:
                text = self._stdout.feed(output.text) if _is_screen(sys.stdout) else output.text
                _write(sys.stdout, text.decode(errors="replace"))

    def progress(self, progress: PlaceProgress) -> None:
        line = harmless_line(f"{progress.prefix}{plain_line(progress.record)}")
        with self._lock:
            is_terminal = sys.stderr is not None and sys.stderr.isatty()
            if is_terminal:
                line = line[: shutil.get_terminal_size().columns - 1]
            if is_terminal or is_notebook():
                _write(sys.stderr, f"\r{line.ljust(len(self._shown))}")
                self._shown = line
            else:
                _write(sys.stderr, f"{line}\n")

    def close(self) -> None:
        with self._lock:
            self._end_line()
            _write(sys.stdout, self._stdout.feed(b"").decode())

    def _end_line(self) -> None:
        """Keep the progress that is shown, and continue below it."""
        if self._shown:
            self._shown = ""
            _write(sys.stderr, "\n")


def _is_screen(stream: TextIO | None) -> bool:
    """Return whether a user views ``stream``.  A pipe or a file gets the output of ranks unchanged."""
    return is_notebook() or (stream is not None and stream.isatty())


def _write(stream: TextIO | None, text: str) -> None:
    if stream is not None:  # None in programs without a console
        stream.write(text)
        stream.flush()
