"""Signals must not be handled while the main thread does what the loop's thread does otherwise.

Python runs signal handlers in the main thread, between any two steps of it.  One that raises, as that of Ctrl-C does,
those that make time-outs of alarms, and that by which torch's DataLoader notices that a worker has died, would leave
half done what can be done only as a whole: an operation that has its number but is in no table, a lock that nobody
gives back.  So for these microseconds handlers are replaced by one that notes the signal.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal itself converts to enumerations, which takes 20 us
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from asyncpar.signals import OwnHandler

T = TypeVar("T")

KEPT = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGVTALRM,
    signal.SIGPROF,
    signal.SIGCHLD,
)
"""What programs handle.  Looking for handlers of all signals there are would take longer than a small operation."""

_NUMBERS = tuple(map(int, KEPT))
_Came = dict[int, tuple[Callable[..., Any], FrameType | None]]


_DEAF_SECONDS = 1.0


def longest_sleep(end: float | None) -> float:
    """Return how long a thread may sleep at a stretch that waits until ``end`` of ``time.monotonic`` (None: for ever).

    Python does not see a signal that comes just as its main thread goes to sleep, until it wakes.
    """
    return _DEAF_SECONDS if end is None else min(max(0.0, end - time.monotonic()), _DEAF_SECONDS)


def do_uninterrupted(function: Callable[[T], object], argument: T) -> None:
    """Call ``function(argument)`` in the main thread; what handles signals that come meanwhile runs after it.

    Each handler runs once, in the order in which the signals came, with all of them in their places again.
    """
    came: _Came = {}
    handlers = [(number, found) for number in _NUMBERS if callable(found := _signal.getsignal(number))]
    try:
        _keep(handlers, came, function, argument)
    finally:
        if came:
            _handle(came)


def _keep(
    handlers: list[tuple[int, Callable[..., Any]]], came: _Came, function: Callable[[T], object], argument: T
) -> None:
    """Call ``function(argument)`` with ``handlers`` out of their places; what they would handle ``came``."""
    if not handlers:  # else: the signal is ignored, or ends the process
        function(argument)
        return
    number, handler = handlers.pop()

    def note(_number: int, frame: FrameType | None) -> None:
        came.setdefault(number, (handler, frame))

    try:
        _signal.signal(number, OwnHandler(note, handler))
        _keep(handlers, came, function, argument)
    finally:
        _signal.signal(number, handler)


def _handle(came: _Came) -> None:
    """Let handlers do what had to wait; one that raises keeps no other from it."""
    number = next(iter(came))
    handler, frame = came.pop(number)
    try:
        handler(number, frame)
    finally:
        if came:
            _handle(came)
