"""Streams among the arguments of a gRPC call: their items come in the messages after it.

One gRPC stream carries all of them, so it is read as fast as the endpoint takes items; a stream that the endpoint has
left takes none, and does not hold up others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine
from typing import Any, Final, TypeVar

from asyncpar._proto.asyncpar.v1 import actors_pb2
from asyncpar.errors import UsageError

ITEMS_AHEAD: Final = 16
"""Number of items of a stream that wait for the endpoint."""

T = TypeVar("T")
_END: Final = object()


class CallStreams:
    """The streams of one call, from the messages that follow it; ``read`` decodes a ``Value``."""

    def __init__(
        self, parts: AsyncIterable[actors_pb2.ActorPart], read: Callable[[actors_pb2.Value, str], object]
    ) -> None:
        self._parts = aiter(parts)
        self._read = read
        self._streams: dict[int, _Incoming] = {}

    async def call(self) -> actors_pb2.ActorCall:
        """Return the call, which is the first message.  Raises ``UsageError`` if it is not."""
        part = await anext(self._parts, None)
        kind = None if part is None else part.WhichOneof("kind")
        if part is None or kind != "call":
            raise UsageError(f"the first message: expected a call, got {kind or 'none'}")
        return part.call

    def open(self, number: int, what: str) -> AsyncGenerator[object, None]:
        """Return the items of the stream ``number``, which is the argument ``what``.  Raises ``UsageError``."""
        if number in self._streams:
            raise UsageError(f"{what}: stream {number} is another argument as well")
        stream = self._streams[number] = _Incoming()
        return stream.items()

    async def beside(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``, and pass on items meanwhile.  Raises ``UsageError`` for wrong messages."""
        working, passing = asyncio.ensure_future(work), asyncio.ensure_future(self._pass_on())
        try:
            await asyncio.wait({working, passing}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                passing.result()
            return await working
        finally:
            working.cancel()
            passing.cancel()
            await asyncio.wait({working, passing})

    async def _pass_on(self) -> None:
        async for part in self._parts:
            match part.WhichOneof("kind"):
                case "item":
                    stream = self._find(part.item.stream)
                    await stream.put(self._read(part.item.value, f"an item of stream {part.item.stream}"))
                case "end":
                    await self._find(part.end).end()
                case kind:
                    raise UsageError(f"expected an item or an end after the call, got {kind or 'nothing'}")
        for stream in self._streams.values():
            await stream.end()

    def _find(self, number: int) -> _Incoming:
        stream = self._streams.get(number)
        if stream is None or stream.has_ended:
            why = "which no argument is" if stream is None else "which has ended"
            raise UsageError(f"expected an item of a stream of the call, got one of stream {number}, {why}")
        return stream


class _Incoming:
    """One stream."""

    def __init__(self) -> None:
        self.has_ended = False
        self._is_left = False
        self._queue = asyncio.Queue[object](ITEMS_AHEAD)

    async def put(self, item: object) -> None:
        if not self._is_left:
            await self._queue.put(item)

    async def end(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            await self.put(_END)

    async def items(self) -> AsyncGenerator[object, None]:
        try:
            while (item := await self._queue.get()) is not _END:
                yield item
        finally:
            self._is_left = True
            while not self._queue.empty():  # tasks that wait for room go on
                self._queue.get_nowait()
