"""A node's place on the loop's thread: how all its parts run their work, until it is closed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from asyncpar.blocking.pending import Pending
from asyncpar.blocking.thread import LoopThread
from asyncpar.errors import NodeClosed, UsageError

T = TypeVar("T")


class NodeHandle:
    """The state that a node, its communicators and its references share."""

    def __init__(self, thread: LoopThread, rank: int) -> None:
        self.thread = thread
        self.rank = rank
        self.is_closed = False

    def wait(self, what: str, make: Callable[[], Coroutine[Any, Any, T]], timeout: float | None = None) -> T:
        """Run the coroutine that ``make`` returns and return its result; ``what`` names it in messages."""
        self.check_open(what)
        if timeout is not None:
            try:
                check_timeout(timeout)
            except UsageError as error:
                refused = error
                self.thread.do(lambda: _refuse(make(), refused))
                raise
        return self.thread.call(make, timeout=timeout, what=what)

    def start(self, what: str, make: Callable[[], Coroutine[Any, Any, T]]) -> Pending[T]:
        """Begin the coroutine that ``make`` returns."""
        self.check_open(what)
        return self.thread.start(make, what=what)

    def do(self, what: str, function: Callable[[], T]) -> T:
        """Call ``function`` on the loop, and return its result."""
        self.check_open(what)
        return self.thread.do(function)

    def read(self, what: str, function: Callable[[], T]) -> T:
        """Return the result of ``function``, which only reads state: it works even when the node is closed."""
        return function() if self.is_closed else self.do(what, function)

    def end(self, what: str, function: Callable[[], None]) -> None:
        """Call ``function`` on the loop, which ends something: everything has ended when the node is closed."""
        if not self.is_closed:
            self.do(what, function)

    def check_open(self, what: str) -> None:
        """Raise ``NodeClosed`` for ``what`` if the node is closed."""
        if self.is_closed:
            raise NodeClosed.of(self.rank, what)


def _refuse(call: Coroutine[Any, Any, Any], error: UsageError) -> None:
    """End ``call``, which has taken its place, with ``error`` on the other ranks."""
    with contextlib.suppress(UsageError):
        call.throw(error)


def check_timeout(seconds: float) -> None:
    """Raise ``UsageError`` unless ``seconds`` is a valid timeout."""
    if not seconds > 0:
        raise UsageError(f"timeout: expected a positive number of seconds or None, got {seconds!r}")
