"""The two ends of one stream: ``Outlet`` produces its items, ``Inlet`` keeps them until they are read."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any, Generic, TypeVar

import msgspec

from asyncpar.actors.runtime.window import STREAM_WINDOW, Outflow, ReceiveWindow, item_cost
from asyncpar.core.concurrency.tasks import INLINE_COPY_BYTES, off_loop
from asyncpar.errors import AsyncparError, ProtocolError, UsageError
from asyncpar.net.wire.payload import PayloadDecoder, UnwrittenPayload


class Outlet:
    """One outgoing stream.

    ``encode`` makes the message of an item, given the item and its number, from 1 on.  The message is written before
    the next item is read, because generators may reuse their buffers.  ``send`` sends the message.  ``is_stopped`` is
    checked after each item, for iterators that swallow a cancellation.
    """

    def __init__(
        self,
        credit: int,
        *,
        encode: Callable[[Any, int], UnwrittenPayload],
        send: Callable[[memoryview], None],
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.produced = 0
        """Number of items sent."""
        self._flow = Outflow(credit)
        self._encode = encode
        self._send = send
        self._is_stopped = is_stopped
        self._waiter: asyncio.Future[None] | None = None

    def credit(self, amount: int) -> None:
        """Add credit for items that cost ``amount``.  Raises ``ProtocolError`` if more are credited than were sent."""
        self._flow.credit(amount)
        if self._flow.is_open and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def drain(self, source: AsyncIterable[Any]) -> None:
        """Send every item of ``source``, in order; close ``source`` in every case.

        Exceptions of ``source`` are raised, and ``UsageError`` for an item that cannot be sent.
        """
        iterator = aiter(source)
        try:
            while True:
                while not self._flow.is_open:
                    await self._wait()
                try:
                    item = await anext(iterator)
                except StopAsyncIteration:
                    return
                if self._is_stopped():
                    raise asyncio.CancelledError
                content = self._encode(item, self.produced + 1)
                payload = await off_loop(content.write, nbytes=content.nbytes, inline=INLINE_COPY_BYTES)
                del content, item
                self._flow.spend(item_cost(payload))
                self.produced += 1
                self._send(payload)
                del payload  # not kept alive while the generator produces the next item
        finally:
            await close_iterator(iterator)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


async def close_iterator(iterator: AsyncIterable[Any]) -> None:
    """Call and await ``aclose`` of ``iterator``, if it has that method."""
    close = getattr(iterator, "aclose", None)
    if close is not None:
        closing = close()
        if inspect.isawaitable(closing):
            await closing


T = TypeVar("T")


class Inlet(AsyncIterator[T], Generic[T]):
    """One incoming stream with one reader.  A reader may stop in the middle and continue later.

    Items are decoded when they are read; an array is a view of the message that carried it.  ``grant`` sends credit;
    if the stream ``is_shut``, nothing may come before the reader has requested an item.
    """

    def __init__(
        self, decoder: PayloadDecoder[Any], *, what: str, grant: Callable[[int], None], is_shut: bool = False
    ) -> None:
        self.wrong_item: UsageError | None = None
        """The last error raised for an item of a wrong type."""
        self._decoder = decoder
        self._what = what
        self._window = ReceiveWindow(STREAM_WINDOW, is_shut=is_shut)
        self._is_shut = is_shut
        self._grant = grant
        self._arrived: deque[tuple[msgspec.Raw, memoryview]] = deque()
        self._read = 0
        self._waiter: asyncio.Future[None] | None = None
        self._is_ended = False
        self._error: AsyncparError | None = None

    def put(self, value: msgspec.Raw, payload: memoryview) -> None:
        """Add an item.  Raises ``ProtocolError`` if the producer had no credit for it or had ended the stream."""
        if self._is_ended:
            raise ProtocolError(f"{self._what}: the peer sent an item after the end")
        self._window.receive(item_cost(payload))
        self._arrived.append((value, payload))
        self._wake()

    def finish(self, error: AsyncparError | None = None) -> None:
        """End the stream after the items that arrived, with ``error`` if there is one."""
        if not self._is_ended:
            self._is_ended = True
            self._error = error
            self._wake()

    def abort(self, error: AsyncparError) -> None:
        """Drop the items that arrived and end the stream with ``error``, even after ``finish``."""
        self._is_ended = True
        self._error = error
        self._arrived.clear()
        self._wake()

    async def __anext__(self) -> T:
        while not self._arrived:
            if self._is_ended:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            await self._wait()
        value, payload = self._arrived.popleft()
        self._read += 1
        credit = self._window.take(item_cost(payload))
        if credit and not self._is_ended:
            self._grant(credit)
        what = f"item {self._read} of {self._what}"
        try:
            item: T = self._decoder.decode_part(value, payload, what=what)
        except UsageError as error:
            self.wrong_item = error
            raise
        return item

    async def _wait(self) -> None:
        if self._waiter is not None:
            raise UsageError(f"{self._what}: a task waits for the next item already; a stream has one reader at a time")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            if self._is_shut:
                self._is_shut = False
                self._grant(self._window.settle())
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
