"""The messages that wait in front of an actor.  Decides only."""

from __future__ import annotations

from collections import deque
from typing import Final

from asyncpar.runtime.delivery import Delivery
from asyncpar.runtime.mailbox import Mailbox, WhenFull

BURST: Final = 32
"""Messages handled in a row before the event loop gets a turn, if no endpoint gave it one."""


class Backlog:
    """Deliveries that wait, first in first out."""

    __slots__ = ("_drops_oldest", "_limit", "_queue")

    def __init__(self, policy: Mailbox) -> None:
        self._limit = policy.limit
        self._drops_oldest = policy.when_full is WhenFull.DROP_OLDEST
        self._queue: deque[Delivery] | None = None  # most actors are idle, and a deque is large

    def __len__(self) -> int:
        return 0 if self._queue is None else len(self._queue)

    def put(self, delivery: Delivery) -> Delivery | None:
        """Add ``delivery``; return the one for which there is no room: ``delivery`` itself, or the oldest."""
        queue = self._queue
        if queue is None:
            queue = self._queue = deque()
        if self._limit is not None and len(queue) >= self._limit:
            if not self._drops_oldest:
                return delivery
            queue.append(delivery)
            return queue.popleft()
        queue.append(delivery)
        return None

    def pop(self) -> Delivery | None:
        """Take out the oldest, None if there is none."""
        if not self._queue:
            return None
        return self._queue.popleft()

    def clear(self) -> list[Delivery]:
        """Take out all."""
        queue, self._queue = self._queue, None
        return [] if queue is None else list(queue)
