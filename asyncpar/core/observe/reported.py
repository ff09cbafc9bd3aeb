"""Figures that a program reports about itself, such as its loss, and its progress: the latest of this process."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Final, SupportsFloat

from asyncpar.errors import UsageError

MOST_VALUES: Final = 32
LONGEST_NAME: Final = 60


class ReportedValues:
    """The latest of each value, and the progress.  May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        self._progress: tuple[str, float, float | None] | None = None
        self._figures: dict[str, str] = {}
        self._calls = 0
        self.gradients: tuple[float, float] | None = None
        """Synchronization of gradients so far: the hidden part of the time, and the ratio of bytes saved."""

    def take(self, values: Mapping[str, SupportsFloat]) -> None:
        """Replace the given values.  Raises ``UsageError`` for values that are not numbers, and for too many names."""
        numbers = {_check_name(name): _number(name, value) for name, value in values.items()}
        with self._lock:
            together = self._values | numbers
            if len(together) > MOST_VALUES:
                raise UsageError(f"report: expected at most {MOST_VALUES} names in a process, got {len(together)}")
            self._values = together
            self._calls += 1

    def note_progress(
        self, description: str, completed: float, total: float | None, figures: Mapping[str, str] | None = None
    ) -> None:
        """Record the progress of the program, and the ``figures`` beside it."""
        with self._lock:
            self._progress = description, completed, total
            self._figures = dict(figures or {})

    @property
    def values(self) -> dict[str, float]:
        """The latest values; do not change them."""
        return self._values

    @property
    def figures(self) -> dict[str, str]:
        """The figures beside the progress; do not change them."""
        return self._figures

    @property
    def progress(self) -> tuple[str, float, float | None] | None:
        """Description, completed steps and their total.  Without other progress, each report counts as a step."""
        if self._progress is not None:
            return self._progress
        return ("reports", float(self._calls), None) if self._calls else None


def _check_name(name: str) -> str:
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        raise UsageError(f"report: expected names of 1 to {LONGEST_NAME} printable characters, got {name[:80]!r}")
    return name


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"report: {name}: expected a number, got {type(value).__name__}") from error


reported: Final = ReportedValues()
"""The values of this process: programs report without access to a node, just as they print."""
