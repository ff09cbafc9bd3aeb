"""The producing end of a stream: advances an async iterator while there is credit, and sends what it yields."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterable, Callable
from typing import Any

from asyncpar.actors.runtime.streams.flow import Outflow, item_cost
from asyncpar.core.concurrency.offload import INLINE_COPY_BYTES, off_loop
from asyncpar.net.wire.payload import UnwrittenPayload


class Outlet:
    """One stream on its way out.

    ``encode`` makes the message of an item, given the item and its number, from 1 on; it is written before the next
    item is asked for, because generators use their buffers again.  ``send`` takes that message away.  ``is_stopped``
    says whether nobody wants items any more,
    for iterators that do not heed a cancellation.
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
        """Items that left."""
        self._flow = Outflow(credit)
        self._encode = encode
        self._send = send
        self._is_stopped = is_stopped
        self._waiter: asyncio.Future[None] | None = None

    def credit(self, amount: int) -> None:
        """The reading end took items.  Raises ``ProtocolError`` for more than are out."""
        self._flow.credit(amount)
        if self._flow.is_open and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def drain(self, source: AsyncIterable[Any]) -> None:
        """Send every item of ``source``, in order, and close it, however this ends.

        Raises what ``source`` raises, and ``UsageError`` for an item that cannot be sent.
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
                del payload  # a generator that thinks for long keeps no message alive
        finally:
            await close_iterator(iterator)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


async def close_iterator(iterator: AsyncIterable[Any]) -> None:
    """Let ``iterator`` run its ``finally`` blocks, if it is of a kind that has such."""
    close = getattr(iterator, "aclose", None)
    if close is not None:
        closing = close()
        if inspect.isawaitable(closing):
            await closing
