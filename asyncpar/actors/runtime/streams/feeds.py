"""The streams that a call brings along: async iterables of the caller, which the endpoint reads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, Coroutine, Sequence
from contextvars import Context, copy_context
from typing import Any, Protocol

from asyncpar.actors.runtime import message
from asyncpar.actors.runtime.execution import is_task_cancelled
from asyncpar.actors.runtime.failure import describe_error
from asyncpar.actors.runtime.outbound import ReplyChannel
from asyncpar.actors.runtime.streams.producing import Outlet, close_iterator
from asyncpar.core.concurrency.worker import ENDS_PROGRAM
from asyncpar.errors import ProtocolError
from asyncpar.net.wire.payload import UnwrittenPayload

_LOG = logging.getLogger(__name__)


class CreateTask(Protocol):
    """``asyncio.TaskGroup.create_task``."""

    def __call__(self, work: Coroutine[Any, Any, None], /, *, context: Context | None = None) -> asyncio.Task[None]: ...


class Feed:
    """One of them.  It is not asked for an item before the endpoint asks for one."""

    def __init__(self, source: AsyncIterable[Any], *, what: str, call: int, number: int, channel: ReplyChannel) -> None:
        self.error: BaseException | None = None
        """What the source raised, or why one of its items cannot be sent."""
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
        """The endpoint wants items."""
        self.outlet.credit(amount)
        if self._task is None and not self._is_stopped:
            self._task = create_task(self._run(), context=self._context)

    def cancel(self) -> None:
        """Nobody wants items any more."""
        if self._is_stopped:
            return  # a second cancellation would interrupt how the source ends
        self._is_stopped = True
        if self._task is not None:
            self._task.cancel()

    async def wait_closed(self) -> None:
        """Return when the source is closed, after ``cancel``."""
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
            self._channel.say(message.FeedEnd(self._call, self._number))

    def _failed(self, error: BaseException) -> None:
        if self._is_stopped:
            _LOG.error("closing %s raised", self._what, exc_info=error)
            return
        self.error = error
        self._channel.say(message.FeedEnd(self._call, self._number, True, *describe_error(error)))

    def _encode(self, item: Any, place: int) -> UnwrittenPayload:
        return self._channel.encode(
            item,
            lambda value: message.Feed(self._call, self._number, value),
            what=f"item {place} of {self._what}",
        )


class Feeds:
    """The streams of one call.  Their tasks end with the call; ``stop`` waits for that."""

    def __init__(self, feeds: Sequence[Feed], create_task: CreateTask) -> None:
        self._feeds = feeds
        self._create_task = create_task

    @property
    def error(self) -> BaseException | None:
        """What the first source that failed raised."""
        return next((feed.error for feed in self._feeds if feed.error is not None), None)

    def credit(self, number: int, amount: int) -> None:
        """The endpoint wants items of stream ``number``.  Raises ``ProtocolError`` if there is no such stream."""
        if number >= len(self._feeds):
            raise ProtocolError(f"stream credit: the call has {len(self._feeds)} streams, got credit for {number}")
        self._feeds[number].credit(amount, self._create_task)

    def cancel(self) -> None:
        """The call is over."""
        for feed in self._feeds:
            feed.cancel()

    async def stop(self) -> None:
        """End the tasks, and return when every source is closed."""
        self.cancel()
        for feed in self._feeds:
            await feed.wait_closed()
