"""Iterators of blocking programs over items that come one by one on the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, Self, TypeVar

from asyncpar.blocking.node_handle import NodeHandle, check_timeout
from asyncpar.errors import UsageError

T = TypeVar("T")


class Items(Iterator[T], Generic[T]):
    """The items of the asynchronous iterator that ``begin`` returns, which is called on the loop now.

    ``what`` names it in messages; ``timeout`` limits the wait for each item, in seconds.  Leaving a loop over it early,
    closing or dropping it closes the iterator.
    """

    def __init__(
        self, handle: NodeHandle, what: str, begin: Callable[[], Any], *, timeout: float | None = None
    ) -> None:
        self._has_begun = self._is_over = True
        self._handle = handle
        self._what = what
        self._timeout = timeout
        self._items = handle.do(what, begin)
        self._has_begun = self._is_over = False
        if timeout is not None:
            try:
                check_timeout(timeout)
            except UsageError:
                self.close()  # it has its place among other operations
                raise

    def __next__(self) -> T:
        if self._is_over:
            raise StopIteration
        self._has_begun = True
        try:
            found = self._handle.wait(self._what, lambda: _next_of(self._items), self._timeout)
        except BaseException:
            self._is_over = True
            raise
        if found is _END:
            self._is_over = True
            raise StopIteration
        return self._shown(found)

    def close(self) -> None:
        """End the iteration, and return when it has ended here.  Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._handle.wait(self._what, lambda: _close(self._items))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        """End it without waiting, since this may happen in any thread, including the loop's."""
        if self._has_begun and not self._is_over and not self._handle.thread.is_closed:
            items = self._items
            self._handle.thread.start(lambda: _close(items))

    def _shown(self, item: Any) -> T:
        """Return ``item`` in the form for the caller."""
        found: T = item
        return found


_END = object()


async def _next_of(items: Any) -> Any:
    try:
        return await anext(items)
    except StopAsyncIteration:
        return _END


async def _close(items: Any) -> None:
    await items.aclose()
