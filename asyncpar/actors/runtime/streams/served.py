"""The streams of one call where it is served: what it yields, and what its caller feeds to it."""

from __future__ import annotations

from collections.abc import AsyncIterable
from typing import Any

from asyncpar.actors.runtime import message
from asyncpar.actors.runtime.execution import Execution
from asyncpar.actors.runtime.outbound import ReplyChannel
from asyncpar.actors.runtime.streams.flow import STREAM_WINDOW
from asyncpar.actors.runtime.streams.producing import Outlet
from asyncpar.actors.runtime.streams.reading import Inlet
from asyncpar.errors import AsyncparError, ProtocolError, RemoteError, UsageError
from asyncpar.net.wire.payload import PayloadDecoder, UnwrittenPayload


class ServedStreams:
    """Made when the endpoint is about to run, closed when it has ended."""

    def __init__(self, call: int, *, channel: ReplyChannel, title: str) -> None:
        self._call = call
        self._channel = channel
        self._title = title
        self._inlets: dict[int, Inlet[Any]] = {}
        self._outlet: Outlet | None = None

    # -- the endpoint's side ---------------------------------------------------------------------------------------

    def open(self, number: int, decoder: PayloadDecoder[Any], what: str) -> Inlet[Any]:
        """Return stream ``number`` of the arguments.  Raises ``UsageError`` if it was opened already."""
        if number in self._inlets:
            raise UsageError(f"{what}: is the same stream as another argument")

        def grant(amount: int) -> None:
            self._channel.say(message.FeedCredit(self._call, number, amount))

        inlet = self._inlets[number] = Inlet[Any](decoder, what=what, grant=grant, is_shut=True)
        return inlet

    async def produce(self, source: AsyncIterable[Any], execution: Execution) -> None:
        """Send every item of ``source``, which runs as ``execution``.  Raises what ``source`` raises."""
        self._outlet = Outlet(
            STREAM_WINDOW, encode=self._encode, send=self._channel.send, is_stopped=lambda: execution.is_interrupted
        )
        await self._outlet.drain(source)

    def blames_caller(self, error: BaseException) -> bool:
        """Is ``error`` that the caller fed an item of the wrong type?"""
        return any(inlet.wrong_item is error for inlet in self._inlets.values())

    def close(self) -> None:
        """The endpoint has ended: whoever still holds one of its streams gets nothing more."""
        self.abort(UsageError(f"{self._title}: the call that brought this stream has ended"))

    # -- the caller's side -----------------------------------------------------------------------------------------

    def abort(self, error: AsyncparError) -> None:
        """Nothing more comes of the caller."""
        for inlet in self._inlets.values():
            inlet.abort(error)

    def feed(self, feed: message.Feed, payload: memoryview) -> None:
        """An item came.  Raises ``ProtocolError`` if it may not."""
        self._inlet(feed.stream).put(feed.value, payload)

    def feed_end(self, end: message.FeedEnd) -> None:
        """A stream has ended.  Raises ``ProtocolError`` if there is none."""
        error = None
        if end.is_failure:
            error = RemoteError(
                end.text, rank=self._channel.rank, type_name=end.type_name, remote_traceback=end.traceback
            )
        self._inlet(end.stream).finish(error)

    def credit(self, amount: int) -> None:
        """The caller took items.  Raises ``ProtocolError`` if it cannot have."""
        if self._outlet is None:
            raise ProtocolError(f"stream credit: {self._title} yielded nothing yet")
        self._outlet.credit(amount)

    def _inlet(self, number: int) -> Inlet[Any]:
        inlet = self._inlets.get(number)
        if inlet is None:
            raise ProtocolError(f"stream: {self._title} has no stream {number}")
        return inlet

    def _encode(self, item: Any, place: int) -> UnwrittenPayload:
        what = f"item {place} of {self._title}"
        return self._channel.encode(item, lambda value: message.Yield(self._call, value), what=what)
