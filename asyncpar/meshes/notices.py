"""What becomes of a round of calls to a mesh when one of them fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Final, Self, TypeAlias

INTERVAL: Final = 0.5
"""Seconds from the first failure to the first notice, and from each notice to the next."""

GiveUp: TypeAlias = Callable[[int, str], None]
"""Ends what the actors of the round do together; gets the rank that is the cause, and why."""


class Notices:
    """Gives up the collectives of a round that has failed, as long as some are still at work, and once in the end.

    They may wait for a rank that will never do its part; whatever else they do goes on.  The first notice is late,
    since most who need the one that failed notice by themselves, and know better what happened.  Use as ``with``.
    """

    def __init__(self, rank: int, ranks: Iterable[int], give_up: GiveUp) -> None:
        """``rank`` is the one that calls, ``ranks`` those that are called."""
        self._rank = rank
        self._waiting = set(ranks)
        self._give_up = give_up
        self._failure: tuple[int, str] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def answered(self, rank: int, failure: Exception | None = None) -> None:
        """``rank`` has answered, or failed."""
        self._waiting.discard(rank)
        if failure is not None and self._failure is None:
            lines = str(failure).splitlines() or [type(failure).__name__]
            self._failure = rank, f"rank {rank} failed: {lines[0]}"
            self._arm()

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(INTERVAL, self._remind)

    def _remind(self) -> None:
        assert self._failure is not None
        if self._waiting:
            self._give_up(*self._failure)
            self._arm()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if error is not None and self._waiting and self._failure is None:
            self._failure = self._rank, f"rank {self._rank} cancelled the call"
        if self._failure is not None:
            self._give_up(*self._failure)
