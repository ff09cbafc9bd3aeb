"""Signal handlers that belong to one process, and that forked children do not inherit.

Such a handler leaves the worlds of this process, or wakes its loop through a file descriptor shared with children.  A
child that inherited it would wake the parent's loop instead of ending.  Python runs handlers only between two bytecode
steps, so a child about to block in a system call would stay blocked, and so would a multiprocessing pool that waits for
its end.  Therefore children get the handler that was installed before.  Signals are blocked from before the fork until
then, so none reaches a handler of the parent.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextvars import ContextVar
from types import FrameType
from typing import Any, Final, TypeAlias

_PROGRAMS_HANDLE = "SIGINT SIGTERM SIGHUP SIGQUIT SIGUSR1 SIGUSR2 SIGALRM SIGVTALRM SIGPROF SIGCHLD"

HANDLED: Final = tuple(signal.Signals[name] for name in _PROGRAMS_HANDLE.split() if hasattr(signal, name))
"""Signals that programs handle, as far as this system has them.  Checking all would outlast a small operation."""

TERMINATING: Final = tuple(signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals by which users, batch systems and closed terminals ask a program to end."""


def signal_name(number: int) -> str:
    """Return the name of a signal: ``SIGTERM``, or ``SIGRTMIN+3`` for one without a name of its own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        pass
    least = getattr(signal, "SIGRTMIN", 0)
    is_real_time = least and least < number < signal.SIGRTMAX
    return f"SIGRTMIN+{number - least}" if is_real_time else f"signal {number}"


class OwnHandler:
    """A signal handler for this process only: forked children get ``before`` instead."""

    __slots__ = ("before", "handle")

    def __init__(self, handle: Callable[[int, FrameType | None], object], before: Any) -> None:
        self.handle = handle
        self.before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.handle(number, frame)


class _Mask(threading.local):
    """The signal mask of a forking thread before the fork."""

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
    """Restore the previous handlers, in the child."""
    try:
        for number in HANDLED:
            handler = signal.getsignal(number)
            if isinstance(handler, OwnHandler):
                signal.set_wakeup_fd(-1)  # the parent reads from it
                while isinstance(handler, OwnHandler):
                    handler = handler.before
                signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: one of C, which is gone
    finally:
        _let_come()


AskToLeave: TypeAlias = Callable[[Callable[[], None]], bool]
"""Requests an orderly exit, and returns whether anybody received the request; calls its argument if it is refused."""


class Termination:
    """Handling of SIGTERM: ``end`` the program; the first one may request an orderly exit instead."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self._ask: AskToLeave | None = None

    def ask_first(self, ask: AskToLeave | None) -> None:
        """Have the next SIGTERM call ``ask``; None: have it end the program."""
        self._ask = ask

    def handle(self) -> None:
        """Handle a SIGTERM."""
        ask, self._ask = self._ask, None
        if ask is None or not ask(self._end):
            self._end()


TERMINATION: Final[ContextVar[Termination | None]] = ContextVar("asyncpar termination", default=None)
"""The ``Termination`` of the program whose main coroutine runs."""

if hasattr(os, "register_at_fork"):  # where processes fork
    os.register_at_fork(before=_keep_back, after_in_parent=_let_come, after_in_child=_hand_down)
