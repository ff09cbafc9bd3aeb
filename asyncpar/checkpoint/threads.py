"""Work on many blocks of memory by a few threads, its progress, and requests to stop it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

S = TypeVar("S")
T = TypeVar("T")

_THREADS: Final = 2
_FEW: Final = 2


def for_each(function: Callable[[S], T], items: Sequence[S]) -> list[T]:
    """Return the result of ``function`` for each of ``items``, in order; the first error cancels the rest.

    Threads help if the function releases the interpreter, as reading and hashing do; they are not worthwhile for a few
    items.
    """
    if len(items) <= _FEW:
        return [function(item) for item in items]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="asyncpar-checkpoint") as threads:
        return list(threads.map(function, items))


class Stopped(Exception):  # noqa: N818
    """The work was stopped."""


class WorkProgress:
    """Shared by a thread and the loop that waits for it.

    ``done`` grows while the work makes progress; if it does not change for long, the work hangs.
    """

    def __init__(self) -> None:
        self.done = 0
        self._is_stopped = False

    def advance(self, amount: int) -> None:
        """Add to the progress.  Raises ``Stopped`` if the work is no longer wanted."""
        self.done += amount
        if self._is_stopped:
            raise Stopped

    def stop(self) -> None:
        """Make the work end at its next ``advance``."""
        self._is_stopped = True
