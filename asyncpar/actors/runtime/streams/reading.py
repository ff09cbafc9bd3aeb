"""The reading end of a stream: keeps what arrived until it is read, and returns credit."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, TypeVar

import msgspec

from asyncpar.actors.runtime.streams.flow import STREAM_WINDOW, item_cost
from asyncpar.actors.runtime.window import ReceiveWindow
from asyncpar.errors import AsyncparError, ProtocolError, UsageError
from asyncpar.net.wire.payload import PayloadDecoder

T = TypeVar("T")


class Inlet(AsyncIterator[T], Generic[T]):
    """One stream on its way in, for one reader.  Leaving it in the middle and reading on later is fine.

    Items are decoded when they are read; an array is a view on the message that carried it.  ``grant`` sends credit.
    If the stream ``is_shut``, nothing may come before the reader has asked for an item.
    """

    def __init__(
        self, decoder: PayloadDecoder[Any], *, what: str, grant: Callable[[int], None], is_shut: bool = False
    ) -> None:
        self.wrong_item: UsageError | None = None
        """What was raised last for an item of a type that the reader does not expect."""
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
        """An item arrived.  Raises ``ProtocolError`` if the producer had no credit for it or had ended the stream."""
        if self._is_ended:
            raise ProtocolError(f"{self._what}: the peer sent an item after the end")
        self._window.receive(item_cost(payload))
        self._arrived.append((value, payload))
        self._wake()

    def finish(self, error: AsyncparError | None = None) -> None:
        """Nothing more will come: after what arrived, reading ends, with ``error`` if there is one."""
        if not self._is_ended:
            self._is_ended = True
            self._error = error
            self._wake()

    def abort(self, error: AsyncparError) -> None:
        """Reading ends at once with ``error``, also after ``finish``."""
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
