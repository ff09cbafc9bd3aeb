"""A block that runs on this rank, and what the others say meanwhile."""

from __future__ import annotations

import asyncio

from asyncpar.errors import AsyncparError
from asyncpar.pipeline.notice import Notice


class Block:
    """One block that runs on this rank."""

    def __init__(self, number: int, task: asyncio.Task[object]) -> None:
        self.number = number
        self.task = task
        self.cancelling = task.cancelling()
        self.notices: list[Notice] = []
        self.error: AsyncparError | None = None
        self.has_cancelled = False
        self.is_failing = False
        self.news = asyncio.Event()
        """Set whenever a notice, a word or an error has come."""

    @property
    def origin(self) -> Notice | None:
        return next((notice for notice in self.notices if notice.is_origin), None)

    def tell(self, what: Notice | AsyncparError) -> None:
        """Another rank has left the block, or nobody can be heard any more: this ends it here, too."""
        if isinstance(what, Notice):
            self.notices.append(what)
        elif self.error is None:
            self.error = what
        self.news.set()
        if not self.has_cancelled and not self.is_failing:
            self.has_cancelled = True
            self.task.cancel()

    @property
    def is_cancelled_by_others(self) -> bool:
        """Has the task been cancelled, within the block, by somebody else than ``tell``?"""
        return self.task.cancelling() > self.cancelling

    def take_back(self) -> bool:
        """Return whether the task was cancelled by nobody but ``tell``; that cancellation is over now."""
        return self.has_cancelled and self.task.uncancel() <= self.cancelling
