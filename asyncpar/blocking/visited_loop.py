"""An event loop that other threads may visit while it waits.

Theory of operation.  Handing work to the thread of a loop and waiting for the result takes two changes of threads,
some 100 us where an operation in shared memory takes 3.  So a thread that has something to do does it itself, if the
loop has nothing else to do, that is: if it waits in its selector.

There is one *turn*, a lock.  The loop's thread holds it whenever it runs, and leaves it to others only around the
system call in which it waits.  Who wants something done puts a request into the queue and tries to take the turn,
without waiting for it.  Who gets it is a *visitor*: it serves all requests in the queue, in their order, as if it were
the loop's thread, and leaves.  Who does not get it leaves the request to whoever has the turn.  No request is
forgotten: everybody looks at the queue once more after leaving the turn, and a request is in the queue before its owner
tries to take the turn.  Nor is the loop kept out for ever by threads that visit again and again: when it is back from
its system call they leave their requests to it.

A visitor may leave callbacks and timers that the waiting loop does not know of; so it wakes the loop, but only then.
Files that a visitor watches need no waking: epoll and kqueue take them up while they wait.  Keys that the selector has
returned may have been changed by a visitor before the loop's thread has the turn again: events of such keys are
dropped; they will be reported again, since selectors report levels and not edges.

After the loop has ended nobody holds the turn, so requests are served by those who make them, at once: it is theirs to
see that there is no loop any more.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections import deque
from collections.abc import Callable
from contextvars import Context
from threading import get_ident
from typing import Any

from asyncpar.blocking.interrupts import do_uninterrupted
from asyncpar.errors import UsageError

Request = Callable[[], object]
"""What to do on the loop; must not raise."""


class VisitedLoop(asyncio.SelectorEventLoop):
    """A selector loop with a queue of requests, which other threads serve while it waits."""

    def __init__(self) -> None:
        self.requests: deque[Request] = deque()
        self.turn = threading.Lock()
        self.is_back = False
        """Does the loop's thread want the turn, after waiting for events?"""
        self.has_more = False
        """Has somebody scheduled something since the loop last looked?"""
        self._is_abandoned = False
        self._main_thread = threading.main_thread().ident
        super().__init__(_LeavingSelector(self))

    def request(self, request: Request) -> None:
        """Have ``request`` done as if on the loop: by this thread, now, if the loop waits; or else soon.

        Requests are done in the order of these calls.
        """
        if get_ident() == self._main_thread:
            do_uninterrupted(self._request, request)
        else:
            self._request(request)

    def check_may_wait(self) -> None:
        """Raise ``UsageError`` in code that the loop runs, which would wait for itself."""
        if asyncio._get_running_loop() is self:
            raise UsageError("wait: this code runs on the loop that it would wait for; use await, or another thread")

    def serve(self) -> None:
        """Do what is requested; with the turn."""
        requests = self.requests
        while requests:
            requests.popleft()()

    def call_soon(  # type: ignore[override]  # argument types that belong together
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        self.has_more = True
        return super().call_soon(callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        self.has_more = True
        return super().call_at(when, callback, *args, context=context)

    def run_forever(self) -> None:
        with self.turn:
            super().run_forever()

    def abandon(self) -> None:
        """In the child of a fork: never close, which would take files from the system's table that the parent uses."""
        self._is_abandoned = True

    def is_closed(self) -> bool:
        return self._is_abandoned or super().is_closed()

    def _request(self, request: Request) -> None:
        self.requests.append(request)
        if self.get_debug() and not self.is_closed():  # asyncio sees to it then that only the loop's thread schedules
            self.call_soon_threadsafe(_nothing)
            return
        while self.requests and not self.is_back and self.turn.acquire(blocking=False):
            self._visit()

    def _visit(self) -> None:
        """Serve, and leave the turn; wake the loop if there is more to do."""
        must_wake = True
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            self.serve()
            must_wake, self.has_more = self.has_more, False
        finally:
            asyncio._set_running_loop(before)
            if must_wake and not self.is_closed():
                self.call_soon_threadsafe(_nothing)
            self.turn.release()


class _LeavingSelector(selectors.DefaultSelector):
    """Leaves the turn while it waits."""

    def __init__(self, loop: VisitedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        loop = self._loop
        if loop.requests:
            loop.has_more = False
            loop.serve()
            if loop.has_more:
                timeout = 0
        loop.has_more = False
        loop.turn.release()
        try:
            events = self._wait(timeout)
        finally:
            loop.is_back = True
            loop.turn.acquire()
            loop.is_back = False
        current = self.get_map()
        return [(key, mask) for key, mask in events if current.get(key.fd) is key]

    def _wait(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for events; before that, see to requests of those who found the turn taken."""
        loop = self._loop
        while loop.requests and loop.turn.acquire(blocking=False):
            try:
                loop.serve()
                if loop.has_more:
                    timeout = 0
            finally:
                loop.turn.release()
        return super().select(timeout)


def _nothing() -> None:
    """Wake the loop."""
