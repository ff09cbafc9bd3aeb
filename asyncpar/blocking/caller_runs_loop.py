"""An event loop whose work other threads may do while it waits.

Theory of operation.  Handing work to the thread of a loop and waiting for the result takes two thread switches, some
100 us where an operation in shared memory takes 3.  So a thread does its own work if the loop is idle, that is, if it
waits in its selector.

There is one *turn*, a lock.  The loop's thread holds it whenever it runs, and releases it only around the system call
in which it waits.  A thread that wants something done puts a request into the queue and tries to take the turn, without
waiting for it.  If it gets the turn it is a *visitor*: it serves all requests in the queue, in order, as if it were the
loop's thread, and leaves.  A thread that does not get it leaves the request to the one that has the turn.  No request
is lost: every thread checks the queue once more after releasing the turn, and a request is in the queue before its
owner tries to take the turn.  Nor is the loop locked out forever by threads that visit again and again: when it is back
from its system call, they leave their requests to it.

A visitor may leave callbacks and timers that the waiting loop does not know of; then, and only then, it wakes the loop.
Files that a visitor watches need no waking: epoll and kqueue pick them up while they wait.  Keys that the selector has
returned may have been changed by a visitor before the loop's thread has the turn again: events of such keys are
dropped; they will be reported again, since selectors are level-triggered.

After the loop has ended no thread holds the turn, so requests are served at once by the threads that make them, which
must check whether the loop still exists.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import threading
from collections import deque
from collections.abc import Callable
from contextvars import Context
from threading import get_ident
from typing import Any, Protocol

from asyncpar.blocking.interrupts import do_uninterrupted
from asyncpar.errors import UsageError
from asyncpar.net.arena.driver import Driver


class Awaited(Protocol):
    """A result that a thread waits for; ``task``, if there is one, produces it."""

    @property
    def is_done(self) -> bool: ...
    @property
    def task(self) -> asyncio.Task[Any] | None: ...


class Borrower(Protocol):
    """A thread that watches the loop's doorbell."""

    def lose_bell(self, descriptor: int) -> None:
        """Stop watching ``descriptor``, which is about to be closed."""


LoopRequest = Callable[[], object]
"""A function to call on the loop; it must not raise."""

FORKED = "this process is a fork of the one that asyncpar's loop runs in; start processes with spawn instead"


class CallerRunsLoop(asyncio.SelectorEventLoop):
    """A selector loop with a queue of requests, which other threads serve while it waits."""

    _ready: deque[asyncio.Handle]

    def __init__(self) -> None:
        self.requests: deque[LoopRequest] = deque()
        self.turn = threading.Lock()
        self.is_back = False
        """Whether the loop's thread wants the turn, after waiting for events."""
        self.has_timer = False
        """Whether a timer was set since the loop last checked."""
        self._bells: set[int] = set()
        self._borrower: Borrower | None = None
        self._is_abandoned = False
        self._main_thread = threading.main_thread().ident
        self._events = _LeavingSelector(self)
        super().__init__(self._events)

    def request(self, request: LoopRequest) -> None:
        """Run ``request`` as if on the loop: now, in this thread, if the loop waits; otherwise soon.

        Requests run in the order of these calls.
        """
        if get_ident() == self._main_thread:
            do_uninterrupted(self._request, request)
        else:
            self._request(request)

    def try_visit(self, request: LoopRequest) -> None:
        """Run ``request`` now, in this thread, if the loop waits; otherwise not at all."""
        if get_ident() == self._main_thread:
            do_uninterrupted(self._try_visit, request)
        else:
            self._try_visit(request)

    def check_may_wait(self) -> None:
        """Raise ``UsageError`` in code that the loop runs, which would wait for itself."""
        if asyncio._get_running_loop() is self:
            raise UsageError("wait: this code runs on the loop that it would wait for; use await, or another thread")

    def serve(self) -> None:
        """With the turn held, serve the queued requests."""
        requests = self.requests
        while requests:
            requests.popleft()()

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        self.has_timer = True
        return super().call_at(when, callback, *args, context=context)

    def run_steps(self, awaited: Awaited) -> None:
        """With the turn held, run the callbacks that produce ``awaited``, while they are next and the loop can wait."""
        task = awaited.task
        try:
            while self._ready and not self.is_back and not awaited.is_done and _brings(self._ready[0], task):
                _run(self._ready.popleft())
        finally:
            del task, awaited  # errors keep the frames that raised them: see ``forget_frames``

    # -- the bell: see ``bell`` --------------------------------------------------------------------------------------

    def add_bell(self, descriptor: int, callback: Callable[[], object]) -> None:
        """Watch ``descriptor`` as ``add_reader`` does; threads that wait may watch it in place of the loop."""
        self.add_reader(descriptor, callback)
        if hasattr(os, "eventfd"):  # it wakes a thread that watches the bell
            self._bells.add(descriptor)

    @property
    def has_bell(self) -> bool:
        """Whether there is exactly one bell, and the selector watches it."""
        return len(self._bells) == 1 and self._borrower is None

    def lend_bell(self, borrower: Borrower) -> int | None:
        """With the turn held, leave the bell to ``borrower`` to watch; return None if that is impossible."""
        key = self._bell_key() if self.has_bell else None
        if key is None or key.events != selectors.EVENT_READ:
            return None
        self._events.modify(key.fd, 0, key.data)
        self._borrower = borrower
        return key.fd

    def answer_bell(self) -> None:
        """With the turn held, do the loop's work when the bell rings."""
        key = self._bell_key()
        if key is not None:
            key.data[0]._run()

    def take_bell_back(self, borrower: Borrower) -> None:
        """With the turn held, watch the bell of ``borrower`` again."""
        if self._borrower is not borrower:
            return
        self._borrower = None
        key = self._bell_key()
        if key is not None and key.events == 0:
            self._events.modify(key.fd, selectors.EVENT_READ, key.data)

    def remove_reader(self, fd: Any) -> bool:
        if fd in self._bells:
            self._bells.remove(fd)
            if self._borrower is not None:
                self._borrower.lose_bell(fd)
        return super().remove_reader(fd)

    def _bell_key(self) -> selectors.SelectorKey | None:
        """Return the selector's key of the bell; None after the loop has ended."""
        return None if self.is_closed() or not self._bells else self._events.get_map().get(next(iter(self._bells)))

    def run_forever(self) -> None:
        with self.turn:
            super().run_forever()

    def abandon(self) -> None:
        """Never close, in the child of a fork: closing removes files that the parent uses from the system's table."""
        self._is_abandoned = True

    def check_runs_here(self) -> None:
        """Raise ``UsageError`` in the child of a fork, where no thread runs the loop."""
        if self._is_abandoned:
            raise UsageError(f"wait: {FORKED}")

    def is_closed(self) -> bool:
        return self._is_abandoned or super().is_closed()

    def _request(self, request: LoopRequest) -> None:
        self.requests.append(request)
        if self.get_debug() and not self.is_closed():  # asyncio then ensures that only the loop's thread schedules
            self.call_soon_threadsafe(_nothing)
            return
        while self.requests and not self.is_back and self.turn.acquire(blocking=False):
            self._visit()

    def _try_visit(self, request: LoopRequest) -> None:
        if not self.get_debug() and not self.is_back and self.turn.acquire(blocking=False):
            self.requests.append(request)
            self._visit()

    def _visit(self) -> None:
        """Serve requests, and release the turn; wake the loop if there is more to do."""
        must_wake = True
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        is_waiting = not self._ready
        try:
            self.serve()
            must_wake, self.has_timer = self.has_timer or (is_waiting and bool(self._ready)), False
        finally:
            asyncio._set_running_loop(before)
            if must_wake and not self.is_closed():
                self.call_soon_threadsafe(_nothing)
            self.turn.release()


class _LeavingSelector(selectors.DefaultSelector):
    """A selector that releases the turn while it waits."""

    def __init__(self, loop: CallerRunsLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        loop = self._loop
        if loop.requests:
            loop.serve()
            if loop.has_timer or loop._ready:
                timeout = 0
        loop.has_timer = False
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
        """Wait for events; before that, serve requests of threads that found the turn taken."""
        loop = self._loop
        while loop.requests and loop.turn.acquire(blocking=False):
            try:
                loop.serve()
                if loop.has_timer or loop._ready:
                    timeout = 0
            finally:
                loop.turn.release()
        return super().select(timeout)


def _brings(handle: asyncio.Handle, task: asyncio.Task[Any] | None) -> bool:
    """Return whether ``handle`` is a step of ``task``, the notice of its end, or a step of shared-memory operations."""
    callback, args = getattr(handle, "_callback", None), getattr(handle, "_args", None)
    owner = getattr(callback, "__self__", None)
    return type(owner) is Driver or (task is not None and (owner is task or args == (task,)))


def _run(handle: asyncio.Handle) -> None:
    try:
        if not handle.cancelled():
            handle._run()
    finally:
        del handle


def _nothing() -> None:
    """Wake the loop."""
