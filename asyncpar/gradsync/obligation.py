"""Collectives that a rank owes the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar

from asyncpar.errors import AsyncparError

T = TypeVar("T")


class Obligation(Generic[T]):
    """One use of a key, which this rank begins exactly once, whatever happens.

    So the uses of a key agree between ranks even after a step that failed on some, and nobody waits for a rank that has
    given up.
    """

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._begin = begin
        self.has_begun = False

    async def run(self) -> T:
        """Begin the collective and return what it does."""
        self.has_begun = True
        return await self._begin()

    async def give_up(self) -> None:
        """Unless it has begun, begin and cancel it, which aborts it everywhere.  Waits for nobody."""
        if not self.has_begun:
            with suppress(TimeoutError, AsyncparError):
                async with asyncio.timeout(0):
                    await self.run()
