"""Deferral of signals while the main thread does the work of the loop's thread.

Python runs signal handlers in the main thread, between any two of its steps.  A handler that raises, like that of
Ctrl-C, those that turn alarms into time-outs, and that by which torch's DataLoader notices a dead worker, would
interrupt work that must be done as a whole: an operation that has its number but is in no table, a lock that no thread
releases.  So for these microseconds handlers are replaced by one that records the signal.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal itself converts to enumerations, which takes 20 us
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, TypeVar

from asyncpar.core.signals import HANDLED, OwnHandler

T = TypeVar("T")

_NUMBERS = tuple(map(int, HANDLED))
_DEAF_SECONDS = 1.0


def longest_sleep(end: float | None) -> float:
    """Return the longest single sleep of a thread that waits until ``end`` of ``time.monotonic`` (None: forever).

    A signal that arrives just as the main thread goes to sleep is not seen by Python until it wakes.
    """
    return _DEAF_SECONDS if end is None else min(max(0.0, end - time.monotonic()), _DEAF_SECONDS)


def do_uninterrupted(function: Callable[[T], object], argument: T) -> None:
    """Call ``function(argument)`` in the main thread; handlers of signals that come meanwhile run after it.

    Each handler runs once, in the order in which the signals came, after all have been restored.
    """
    global _keeper  # noqa: PLW0603
    found = [*map(_signal.getsignal, _NUMBERS)]
    if found != _keeper.found:
        if any(isinstance(handler, _Note) for handler in found):  # this runs inside of another call
            function(argument)
            return
        _keeper = _Keeper(found)
    _keeper.call(function, argument)


class _Note(OwnHandler):
    """Stands in for a handler."""

    __slots__ = ()


class _Keeper:
    """Defers the work of the handlers that were ``found``."""

    def __init__(self, found: list[Any]) -> None:
        self.found = found
        self._handlers = [
            (number, handler) for number, handler in zip(_NUMBERS, found, strict=True) if callable(handler)
        ]
        self._notes = [(number, _Note(partial(self._note, handler), handler)) for number, handler in self._handlers]
        self._came: list[tuple[Callable[..., object], int, FrameType | None]] = []

    def call(self, function: Callable[[T], object], argument: T) -> None:
        try:
            for number, note in self._notes:
                _signal.signal(number, note)
            function(argument)
        finally:
            try:
                self._restore(0)
            finally:
                if self._came:
                    came, self._came = self._came, []
                    _handle(came)

    def _note(self, handler: Callable[..., object], number: int, frame: FrameType | None) -> None:
        if all(number != other for _, other, _ in self._came):
            self._came.append((handler, number, frame))

    def _restore(self, place: int) -> None:
        """Restore all handlers from ``place`` on; one that is called at once does not keep the others from it."""
        try:
            while place < len(self._handlers):
                _signal.signal(*self._handlers[place])
                place += 1
        finally:
            if place < len(self._handlers):
                self._restore(place)


def _handle(came: list[tuple[Callable[..., object], int, FrameType | None]]) -> None:
    """Run deferred handlers; one that raises does not keep the others from it."""
    handler, number, frame = came.pop(0)
    try:
        handler(number, frame)
    finally:
        if came:
            _handle(came)


_keeper = _Keeper([None] * len(_NUMBERS))
