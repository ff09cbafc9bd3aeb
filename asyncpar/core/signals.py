"""Handlers that belong to one process, and that the children of its forks do not inherit.

Such a handler leaves the worlds that this process is in, or wakes its loop through a file that a child shares.  A child
that inherited it would wake the parent's loop in place of ending; and since Python runs handlers only between two steps
of its own, a child that is just going to sleep in a system call would sleep on, and who waits for its end, such as a
pool of multiprocessing, with it.  So children get what handled the signal before.  Signals are kept back from before
the fork until then, so that none comes to a handler that is not the child's.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

HANDLED = (
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


class OwnHandler:
    """``handle``, for this process only: in children of forks ``before`` is in its place."""

    __slots__ = ("before", "handle")

    def __init__(self, handle: Callable[[int, FrameType | None], object], before: Any) -> None:
        self.handle = handle
        self.before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.handle(number, frame)


class _Mask(threading.local):
    """The mask of a thread that forks, as it was before."""

    before: set[int | signal.Signals] | None = None


_mask = _Mask()


def _keep_back() -> None:
    own = [number for number in HANDLED if isinstance(signal.getsignal(number), OwnHandler)]
    if own:
        _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, own)


def _let_come() -> None:
    before, _mask.before = _mask.before, None
    if before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _hand_down() -> None:
    """In the child."""
    try:
        for number in HANDLED:
            handler = signal.getsignal(number)
            if isinstance(handler, OwnHandler):
                signal.set_wakeup_fd(-1)  # who reads what is written there is the parent
                while isinstance(handler, OwnHandler):
                    handler = handler.before
                signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: one of C, which is gone
    finally:
        _let_come()


os.register_at_fork(before=_keep_back, after_in_parent=_let_come, after_in_child=_hand_down)
