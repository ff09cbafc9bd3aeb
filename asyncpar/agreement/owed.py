"""Collectives that a rank owes the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar

from asyncpar.errors import AsyncparError

T = TypeVar("T")


class OwedCollective(Generic[T]):
    """One use of a key, which this rank takes exactly once: by ``run``, or by ``close`` if it fails before that.

    So all ranks have used a key equally often after a step that failed on some, and no rank waits for a collective
    that this one does not run.  ``begin`` calls the collective.
    """

    __slots__ = ("_begin", "has_begun")

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._begin = begin
        self.has_begun = False

    async def run(self) -> T:
        """Begin the collective and return its result."""
        self.has_begun = True
        return await self._begin()

    def close(self) -> None:
        """Unless it has begun, abort the collective on all ranks.  Does not wait, and sends none of this rank's data.

        The other ranks raise ``PeerCancelled`` with the reason that ``cancel_reason`` has for this rank.
        """
        if not self.has_begun:
            self.has_begun = True
            with suppress(AsyncparError, asyncio.CancelledError):  # of ranks that are gone, or the one thrown here
                self._begin().throw(asyncio.CancelledError())
