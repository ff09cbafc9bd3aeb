"""Waits for results by watching the doorbell that announces them.

Theory of operation.  An operation in shared memory that must wait goes on when a peer writes to this rank's *bell*, a
pipe that the loop watches.  If only the loop did, every wait would take two thread switches: the bell wakes the loop's
thread, which completes the operation and wakes the thread that waits for it.  So a thread that has to wait *borrows*
the bell: meanwhile the thread itself watches it instead of the loop's selector, together with a file of its own by
which all others can wake it.  When the bell rings it visits the loop (see ``caller_runs_loop``), does the loop's work,
and also runs those callbacks of the loop that belong to the awaited result, if they are next.

The bell is lent to one thread at a time; others wait as if there were none.  It is taken only with the turn held, and
given back by a request, which is never lost.  Files are level-triggered: the loop finds whatever has come by then.
"""

from __future__ import annotations

import os
import select
import threading
import time

from asyncpar.blocking.caller_runs_loop import Awaited, CallerRunsLoop
from asyncpar.blocking.interrupts import longest_sleep


class _Waker:
    """The file that wakes a polling thread."""

    event = -1

    def __init__(self) -> None:
        self.event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __del__(self) -> None:
        if self.event >= 0:  # otherwise none was available
            os.close(self.event)


class _Wakers(threading.local):
    """One waker for each thread that needs it."""

    own: _Waker | None = None


_wakers = _Wakers()


class DoorbellWaiter:
    """Lets one thread wait for ``awaited`` while it watches the doorbell of ``loop``."""

    def __init__(self, loop: CallerRunsLoop, awaited: Awaited) -> None:
        self._loop = loop
        self._awaited = awaited
        self._thread = threading.get_ident()
        self._bell: int | None = None
        self._is_borrower = False
        if _wakers.own is None:
            _wakers.own = _Waker()
        self._waker = _wakers.own
        self._poller = select.poll()
        self._leaving = threading.Lock()
        self._has_left = False
        self._has_rung = False
        """Whether the doorbell has rung, without an answer so far."""
        self._watched: int | None = None

    def wait(self, timeout: float | None) -> bool:
        """Wait with the bell for ``awaited``, ``timeout`` seconds at most; return False if the bell is unavailable."""
        try:
            try:
                self._loop.try_visit(self._borrow)
                if self._is_borrower:
                    self._wait(None if timeout is None else time.monotonic() + timeout)
                return self._is_borrower
            finally:
                self._leave()
        finally:
            self._leave()  # again, in case a signal came just then: without its bell the loop would be deaf

    def release(self) -> None:
        """Wake the thread.  Thread-safe."""
        if threading.get_ident() == self._thread:
            return
        with self._leaving:
            if not self._has_left:
                os.eventfd_write(self._waker.event, 1)

    def _wait(self, end: float | None) -> None:
        self._poller.register(self._waker.event, select.POLLIN)
        while not self._awaited.is_done:
            self._watch(None if self._has_rung else self._bell)
            seconds = longest_sleep(end)
            if not self._listen(seconds) and seconds == 0:
                return

    def _leave(self) -> None:
        if not self._is_borrower:
            return
        with self._leaving:
            self._has_left = True
        self._loop.request(self._give_back)
        self._is_borrower = False

    def _watch(self, bell: int | None) -> None:
        if bell != self._watched:
            if self._watched is not None:
                self._poller.unregister(self._watched)
            if bell is not None:
                self._poller.register(bell, select.POLLIN)
            self._watched = bell

    def _listen(self, seconds: float) -> bool:
        """Wait for an event, and handle it; return False if none has come in time."""
        ready = self._poller.poll(seconds * 1e3)
        for descriptor, _ in ready:
            if descriptor == self._waker.event:
                os.eventfd_read(descriptor)
            else:
                self._has_rung = True
                self._loop.request(self._answer)
        return bool(ready)

    # -- with the turn held: must not raise ------------------------------------------------------------------------

    def lose_bell(self, descriptor: int) -> None:
        if descriptor == self._bell:
            self._bell = None
            self.release()

    def _borrow(self) -> None:
        self._bell = self._loop.lend_bell(self)
        self._is_borrower = self._bell is not None

    def _give_back(self) -> None:
        self._loop.take_bell_back(self)

    def _answer(self) -> None:
        self._has_rung = False
        self._loop.answer_bell()
        self._loop.run_steps(self._awaited)
        self.release()
