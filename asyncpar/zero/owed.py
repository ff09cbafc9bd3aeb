"""Collectives that a rank owes the others."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar

from asyncpar.errors import AsyncparError

T = TypeVar("T")


class Owed(Generic[T]):
    """One use of a name, to be awaited or given up: then others that wait for it are told, and get no data.

    ``begin`` calls the collective, all of which meet by name.  ``give_up`` aborts it where closing the call does not.
    """

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, T]], give_up: Callable[[], None] | None = None) -> None:
        self._begin = begin
        self._give_up = give_up or (lambda: begin().close())
        self._has_begun = False

    async def run(self) -> T:
        """Return what the collective does."""
        self._has_begun = True
        return await self._begin()

    def give_up(self) -> None:
        """Unless it has begun, abort it everywhere.  Waits for nobody.

        It is called, which takes the place in the order of uses, and never awaited: so nothing is sent that could pass
        for what others wait for.
        """
        if not self._has_begun:
            self._has_begun = True
            with suppress(AsyncparError):  # others are gone, or the group is closed: nobody waits
                self._give_up()
