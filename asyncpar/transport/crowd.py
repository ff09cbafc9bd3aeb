"""Who stands at a door and has not come in yet: few at a time, whoever else comes.  Pure.

When there are too many, one leaves, and chance says who.  If it were the oldest, a flood could keep out everybody who
needs longer for a handshake than the flood for its next ``limit`` connections; so everybody has a chance, at each try.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Crowd(Generic[T]):
    """A bounded set of those who wait."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._waiting: dict[T, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[T]:
        return iter(tuple(self._waiting))

    def enter(self, who: T, *, limit: int) -> T | None:
        """Let ``who`` wait; return who must leave for it, None while there is room for ``limit``."""
        pushed = None
        if len(self._waiting) >= limit:
            pushed = self._dice.choice(tuple(self._waiting))
            del self._waiting[pushed]
        self._waiting[who] = None
        return pushed

    def leave(self, who: T) -> None:
        """``who`` does not wait any more, if it ever did."""
        self._waiting.pop(who, None)
