"""Ctrl-C must not come while the main thread does what the loop's thread does otherwise.

Python runs signal handlers in the main thread, between any two steps of it.  One that raises, as that of Ctrl-C does,
would leave half done what can be done only as a whole: an operation that has its number but is in no table, a lock that
nobody gives back.  So for these microseconds handlers are replaced by one that notes the signal.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal itself converts to enumerations, which takes 20 us
import signal
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TypeVar

from asyncpar.signals import OwnHandler

T = TypeVar("T")

_INTERRUPT = int(signal.SIGINT)
_TERMINATE = int(signal.SIGTERM)


def do_uninterrupted(function: Callable[[T], object], argument: T) -> None:
    """Call ``function(argument)`` in the main thread; what handles signals that come meanwhile runs after it."""
    if callable(_signal.getsignal(_TERMINATE)):
        _keeping(_TERMINATE, partial(_keeping, _INTERRUPT, function), argument)
    else:
        _keeping(_INTERRUPT, function, argument)


def _keeping(number: int, function: Callable[[T], object], argument: T) -> None:
    handler = _signal.getsignal(number)
    if not callable(handler):  # it is ignored, or ends the process
        function(argument)
        return
    came: list[FrameType | None] = []

    def keep(_number: int, frame: FrameType | None) -> None:
        came.append(frame)

    try:
        _signal.signal(number, OwnHandler(keep, handler))
        function(argument)
    finally:
        _signal.signal(number, handler)
        if came:
            handler(number, came[0])
