"""Deliver items to all listeners, each at its own pace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, Self, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


class Listener(AsyncIterator[T]):
    """Iterates over the items sent after it was made, until its broadcast is closed.  Made by ``Broadcast.listen``."""

    def __init__(self) -> None:
        self._items: asyncio.Queue[tuple[T] | None] = asyncio.Queue()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        item = await self._items.get()
        if item is None:
            self.end()  # for the next call
            raise StopAsyncIteration
        return item[0]

    def put(self, item: T) -> None:
        """Add an item."""
        self._items.put_nowait((item,))

    def end(self) -> None:
        """End the iteration after the queued items."""
        self._items.put_nowait(None)


class Broadcast(Generic[T]):
    """Sends items to all listeners, in order.  A listener that nobody refers to any more is forgotten."""

    def __init__(self) -> None:
        self._listeners: WeakValueDictionary[int, Listener[T]] = WeakValueDictionary()  # by age: in a fixed order
        self._count = 0
        self._is_closed = False

    def listen(self) -> Listener[T]:
        """Return a listener, which receives every item from now on.  After ``close`` it ends at once."""
        listener = Listener[T]()
        if self._is_closed:
            listener.end()
        self._count += 1
        self._listeners[self._count] = listener
        return listener

    def send(self, item: T) -> None:
        """Send ``item`` to all listeners."""
        for listener in self._now():
            listener.put(item)

    def close(self) -> None:
        """End all listeners, later ones too.  Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            for listener in self._now():
                listener.end()

    def _now(self) -> list[Listener[T]]:
        return [listener for _, listener in sorted(self._listeners.items(), key=lambda item: item[0])]
