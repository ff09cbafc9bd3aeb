"""Collectives that a rank owes the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar

from asyncpar.errors import AsyncparError

T = TypeVar("T")


class OwedCollective(Generic[T]):
    """One use of a key, which this rank takes exactly once: by ``run``, or by ending it if it fails before that.

    So the uses of a key stay equal on all ranks after a step that failed on some, and no rank waits for one that does
    not come.  ``begin`` calls the collective.  ``abort`` is what ``close`` does where closing that call is not enough.
    """

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, T]], abort: Callable[[], None] | None = None) -> None:
        self._begin = begin
        self._abort = abort or (lambda: begin().close())
        self.has_begun = False

    async def run(self) -> T:
        """Begin the collective and return its result."""
        self.has_begun = True
        return await self._begin()

    def close(self) -> None:
        """Unless it has begun, abort the collective on all ranks.  Does not wait, and sends no data."""
        if not self.has_begun:
            self.has_begun = True
            with suppress(AsyncparError):  # the other ranks are gone, or the group is closed: no rank waits
                self._abort()

    async def begin_and_cancel(self) -> None:
        """Unless it has begun, begin the collective and cancel it, which aborts it on all ranks.  Does not wait.

        Other ranks learn why this one was cancelled, and may get the data that this one has; so that must not pass for
        a contribution.
        """
        if not self.has_begun:
            with suppress(TimeoutError, AsyncparError):
                async with asyncio.timeout(0):
                    await self.run()
