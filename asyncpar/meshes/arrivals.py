"""Wait for many things at once and take each as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")


class Arrivals(Generic[T]):
    """The work of several ranks, in tasks that end with its ``async with``; whatever is not done then is cancelled.

    Unlike a task group it may be left in the middle, as an async generator is whose reader has seen enough.
    """

    def __init__(self) -> None:
        self._ranks: dict[asyncio.Task[T], int] = {}
        self._done: asyncio.Queue[asyncio.Task[T]] = asyncio.Queue()

    def __len__(self) -> int:
        """How many have not been taken yet."""
        return len(self._ranks)

    def begin(self, rank: int, work: Coroutine[Any, Any, T]) -> None:
        """Run ``work`` for ``rank``."""
        task = asyncio.create_task(work)
        self._ranks[task] = rank
        task.add_done_callback(self._done.put_nowait)

    async def take(self) -> tuple[int, asyncio.Task[T]]:
        """Return what was done first, and not taken yet: its rank and its task, which has ended."""
        task = await self._done.get()
        return self._ranks.pop(task), task

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        tasks = list(self._ranks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)
