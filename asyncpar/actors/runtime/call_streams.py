"""The streams of one call: ``Feeds`` at its caller, who passes streams, and ``ServedStreams`` where it is served."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, Callable, Coroutine, Sequence
from contextvars import Context, copy_context
from typing import Any, Protocol

from asyncpar.actors.runtime import message
from asyncpar.actors.runtime.failure import describe_error
from asyncpar.actors.runtime.outbound import ReplyChannel
from asyncpar.actors.runtime.stream_ends import Inlet, Outlet, close_iterator
from asyncpar.actors.runtime.window import STREAM_WINDOW
from asyncpar.core.concurrency.tasks import is_task_cancelled
from asyncpar.core.concurrency.worker import ENDS_PROGRAM
from asyncpar.errors import AsyncparError, ProtocolError, RemoteError, UsageError
from asyncpar.net.wire.payload import PayloadDecoder, UnwrittenPayload

_LOG = logging.getLogger(__name__)


class CreateTask(Protocol):
    """``asyncio.TaskGroup.create_task``."""

    def __call__(self, work: Coroutine[Any, Any, None], /, *, context: Context | None = None) -> asyncio.Task[None]: ...


class Feed:
    """One stream among the arguments of a call.  Its source is not read before the endpoint reads."""

    def __init__(self, source: AsyncIterable[Any], *, what: str, call: int, number: int, channel: ReplyChannel) -> None:
        self.error: BaseException | None = None
        """The error of the source, or the reason why one of its items cannot be sent."""
        self.outlet = Outlet(0, encode=self._encode, send=channel.send, is_stopped=lambda: self._is_stopped)
        self._source = source
        self._what = what
        self._call = call
        self._number = number
        self._channel = channel
        self._context = copy_context()
        self._task: asyncio.Task[None] | None = None
        self._has_begun = False
        self._is_stopped = False

    def credit(self, amount: int, create_task: CreateTask) -> None:
        """Produce items that cost ``amount`` more; start the task of the source if there is none."""
        self.outlet.credit(amount)
        if self._task is None and not self._is_stopped:
            self._task = create_task(self._run(), context=self._context)

    def cancel(self) -> None:
        """Produce no more items."""
        if self._is_stopped:
            return  # a second cancellation would interrupt the source's clean-up
        self._is_stopped = True
        if self._task is not None:
            self._task.cancel()

    async def wait_closed(self) -> None:
        """Wait, after ``cancel``, until the source is closed."""
        if self._task is not None:
            await asyncio.wait({self._task})
        if not self._has_begun:
            self._has_begun = True
            try:
                await close_iterator(self._source)
            except (asyncio.CancelledError, *ENDS_PROGRAM):
                raise
            except BaseException:  # noqa: BLE001  # user code; the call is over
                _LOG.exception("closing %s raised", self._what)

    async def _run(self) -> None:
        self._has_begun = True
        try:
            await self.outlet.drain(self._source)
        except ENDS_PROGRAM:
            raise
        except asyncio.CancelledError as error:
            if self._is_stopped or is_task_cancelled():
                raise
            self._failed(error)
        except BaseException as error:  # noqa: BLE001  # user code; the caller raises it
            self._failed(error)
        else:
            self._channel.send_message(message.FeedEnd(self._call, self._number))

    def _failed(self, error: BaseException) -> None:
        if self._is_stopped:
            _LOG.error("closing %s raised", self._what, exc_info=error)
            return
        self.error = error
        self._channel.send_message(message.FeedEnd(self._call, self._number, True, *describe_error(error)))

    def _encode(self, item: Any, place: int) -> UnwrittenPayload:
        return self._channel.encode(
            item,
            lambda value: message.FeedMessage(self._call, self._number, value),
            what=f"item {place} of {self._what}",
        )


class Feeds:
    """The streams among the arguments of one call, at its caller.  ``stop`` ends their tasks."""

    def __init__(self, feeds: Sequence[Feed], create_task: CreateTask) -> None:
        self._feeds = feeds
        self._create_task = create_task

    @property
    def error(self) -> BaseException | None:
        """The error of the first source that failed."""
        return next((feed.error for feed in self._feeds if feed.error is not None), None)

    def credit(self, number: int, amount: int) -> None:
        """Produce items of stream ``number`` that cost ``amount``.  Raises ``ProtocolError`` for an unknown stream."""
        if number >= len(self._feeds):
            raise ProtocolError(f"stream credit: the call has {len(self._feeds)} streams, got credit for {number}")
        self._feeds[number].credit(amount, self._create_task)

    def cancel(self) -> None:
        """Produce no more items of any stream."""
        for feed in self._feeds:
            feed.cancel()

    async def stop(self) -> None:
        """End the tasks, and return when every source is closed."""
        self.cancel()
        for feed in self._feeds:
            await feed.wait_closed()


class ServedStreams:
    """The streams of one call at its actor.  Created before the endpoint runs, closed after it."""

    def __init__(self, call: int, *, channel: ReplyChannel, title: str) -> None:
        self._call = call
        self._channel = channel
        self._title = title
        self._inlets: dict[int, Inlet[Any]] = {}
        self._outlet: Outlet | None = None

    # -- interface of the endpoint ---------------------------------------------------------------------------------

    def open(self, number: int, decoder: PayloadDecoder[Any], what: str) -> Inlet[Any]:
        """Return stream ``number`` of the arguments.  Raises ``UsageError`` if it was opened already."""
        if number in self._inlets:
            raise UsageError(f"{what}: is the same stream as another argument")

        def grant(amount: int) -> None:
            self._channel.send_message(message.FeedCredit(self._call, number, amount))

        inlet = self._inlets[number] = Inlet[Any](decoder, what=what, grant=grant, is_shut=True)
        return inlet

    async def produce(self, source: AsyncIterable[Any], is_stopped: Callable[[], bool]) -> None:
        """Send every item of ``source`` until it ends or ``is_stopped()``.  Exceptions of ``source`` are raised."""
        self._outlet = Outlet(STREAM_WINDOW, encode=self._encode, send=self._channel.send, is_stopped=is_stopped)
        await self._outlet.drain(source)

    def blames_caller(self, error: BaseException) -> bool:
        """Return whether ``error`` was raised because the caller sent an item of the wrong type."""
        return any(inlet.wrong_item is error for inlet in self._inlets.values())

    def close(self) -> None:
        """End all streams with an error; tasks that the endpoint started may still read them."""
        self.abort(UsageError(f"{self._title}: the call that brought this stream has ended"))

    # -- interface of the caller -----------------------------------------------------------------------------------

    def abort(self, error: AsyncparError) -> None:
        """End all streams of the caller with ``error``."""
        for inlet in self._inlets.values():
            inlet.abort(error)

    def feed(self, feed: message.FeedMessage, payload: memoryview) -> None:
        """Add an item to its stream.  Raises ``ProtocolError`` if the stream does not exist or has no room."""
        self._inlet(feed.stream).put(feed.value, payload)

    def feed_end(self, end: message.FeedEnd) -> None:
        """End a stream.  Raises ``ProtocolError`` if it does not exist."""
        error = None
        if end.is_failure:
            error = RemoteError(
                end.text, rank=self._channel.rank, type_name=end.type_name, remote_traceback=end.traceback
            )
        self._inlet(end.stream).finish(error)

    def credit(self, amount: int) -> None:
        """Produce items that cost ``amount`` more.  Raises ``ProtocolError`` if more are credited than were sent."""
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
