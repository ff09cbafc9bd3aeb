"""Calls with streams, at their caller: ``ask`` for calls with stream arguments, ``stream`` for endpoints that yield."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from functools import partial
from types import AsyncGeneratorType
from typing import Any

from asyncpar.actors.runtime import message
from asyncpar.actors.runtime.call_streams import CreateTask, Feed, Feeds
from asyncpar.actors.runtime.caller import Caller
from asyncpar.actors.runtime.calls import PendingCall
from asyncpar.actors.runtime.deadline_discovery import Iteration
from asyncpar.actors.runtime.outbound import Outbound, ReplyChannel
from asyncpar.actors.runtime.ref import ActorRef
from asyncpar.actors.runtime.stream_ends import Inlet
from asyncpar.actors.runtime.stream_types import take_streams
from asyncpar.errors import AsyncparError, PeerLost, ProtocolError
from asyncpar.net.wire.payload import Extension, PayloadDecoder


class StreamCaller:
    """Makes the streaming calls of one rank, through its ``caller``."""

    def __init__(self, caller: Caller, *, outbound: Outbound, extension: Extension, create_task: CreateTask) -> None:
        self._caller = caller
        self._outbound = outbound
        self._extension = extension
        self._create_task = create_task
        self._nothing = PayloadDecoder[Any](Any)

    # -- outgoing --------------------------------------------------------------------------------------------------

    async def ask(
        self,
        ref: ActorRef[Any],
        endpoint: str,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        result: PayloadDecoder[Any],
    ) -> Any:
        """Ask with streams among the arguments.  Raises like an ask, and the exceptions of these streams."""
        arguments, keywords, sources = take_streams(endpoint, arguments, keywords)
        pending = self._caller.begin(ref, endpoint, arguments, keywords, result)
        feeds = self._attach(pending, sources)
        failure: AsyncparError | None = None
        value = None
        try:
            await self._caller.write(pending)
            value = await pending.future
        except AsyncparError as error:
            failure = error
        finally:
            self._caller.end(pending)
            await feeds.stop()
        _raise_first(feeds.error, failure)
        return value

    def stream(
        self,
        ref: ActorRef[Any],
        endpoint: str,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        item: PayloadDecoder[Any],
    ) -> AsyncGenerator[Any, None]:
        """Call an endpoint that yields and iterate over its items, decoded by ``item``.  Raises like ``ask``."""
        itself: list[Iteration] = []
        iterator = self._iterate(ref, endpoint, arguments, keywords, item, itself)
        assert isinstance(iterator, AsyncGeneratorType)
        itself.append(weakref.ref(iterator))
        return iterator

    async def _iterate(
        self,
        ref: ActorRef[Any],
        endpoint: str,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        item: PayloadDecoder[Any],
        itself: list[Iteration],
    ) -> AsyncGenerator[Any, None]:
        arguments, keywords, sources = take_streams(endpoint, arguments, keywords)
        pending = self._caller.begin(ref, endpoint, arguments, keywords, self._nothing, wants_stream=True)
        self._caller.deadlines.begin(pending, *itself)
        inlet = pending.inlet = self._inlet(pending, item)
        feeds = self._attach(pending, sources)
        failure: AsyncparError | None = None
        try:
            await self._caller.write(pending)
            async for received in inlet:
                yield received
        except AsyncparError as error:
            failure = error
        finally:
            self._caller.end(pending)
            await feeds.stop()
        _raise_first(feeds.error, failure)

    def _inlet(self, pending: PendingCall, item: PayloadDecoder[Any]) -> Inlet[Any]:
        def grant(amount: int) -> None:
            self._outbound.send_message(pending.ref.rank, message.YieldCredit(pending.call, amount))

        inlet = Inlet[Any](item, what=pending.title, grant=grant)
        pending.future.add_done_callback(partial(_end, inlet))
        return inlet

    def _attach(self, pending: PendingCall, sources: Sequence[tuple[str, AsyncIterable[Any]]]) -> Feeds:
        """Feed ``sources`` to the call when its endpoint wants them, at most until it is answered."""
        channel = ReplyChannel(self._outbound, pending.ref.rank, self._extension)
        feeds = Feeds(
            [
                Feed(source, what=what, call=pending.call, number=number, channel=channel)
                for number, (what, source) in enumerate(sources)
            ],
            self._create_task,
        )
        pending.feeds = feeds
        pending.future.add_done_callback(lambda _: feeds.cancel())
        return feeds

    # -- incoming --------------------------------------------------------------------------------------------------

    def item(self, rank: int, item: message.Yield, payload: memoryview) -> None:
        """Add an item that the endpoint yielded; dropped if the call is over."""
        pending = self._caller.find(rank, item.call)
        if pending is None:
            return
        if pending.inlet is None:
            raise ProtocolError(
                f"stream: rank {rank} sent an item of {pending.title}, which was not asked for a stream"
            )
        pending.inlet.put(item.value, payload)

    def credit(self, rank: int, credit: message.FeedCredit) -> None:
        """Add credit for a stream among the arguments; ignored if the call is over."""
        pending = self._caller.find(rank, credit.call)
        if pending is None:
            return
        if pending.feeds is None:
            raise ProtocolError(f"stream credit: rank {rank} sent some for {pending.title}, which has no streams")
        pending.feeds.credit(credit.stream, credit.amount)


def _end(inlet: Inlet[Any], answer: asyncio.Future[Any]) -> None:
    """End the items of a call with its answer."""
    error = None if answer.cancelled() else answer.exception()
    if isinstance(error, PeerLost):
        inlet.abort(error)
    else:
        assert error is None or isinstance(error, AsyncparError)
        inlet.finish(error)


def _raise_first(own: BaseException | None, failure: AsyncparError | None) -> None:
    """Raise ``own``, an error of a stream of the caller, which caused any ``failure``; else raise ``failure``."""
    if own is not None:
        raise own
    if failure is not None:
        raise failure
