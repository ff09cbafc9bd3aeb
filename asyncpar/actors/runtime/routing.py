"""Reception of actor messages, and their dispatch to the part of the actor system that handles their type."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

from asyncpar.actors.runtime import message
from asyncpar.actors.runtime.ask_answers import AskAnswers
from asyncpar.actors.runtime.call_streams import ServedStreams
from asyncpar.actors.runtime.callee import Callee
from asyncpar.actors.runtime.caller import Caller
from asyncpar.actors.runtime.lifecycle import Lifecycle, Requests
from asyncpar.actors.runtime.registry import ActorRegistry
from asyncpar.actors.runtime.stream_caller import StreamCaller
from asyncpar.actors.runtime.watches import Watches
from asyncpar.errors import ProtocolError, UsageError
from asyncpar.net.transport.links import Links
from asyncpar.net.wire.array import Buffer
from asyncpar.net.wire.payload import PayloadDecoder

Handler = Callable[[int, Any, memoryview], None]


class MessageDecoder:
    """Decodes envelopes.  Create one per system."""

    def __init__(self) -> None:
        self._decoder = PayloadDecoder[message.Message](message.Message)

    def decode(self, payload: Buffer) -> message.Message:
        """Decode the message in ``payload``.  Raises ``ProtocolError`` if there is none."""
        try:
            return self._decoder.decode(payload, what="actor message")
        except UsageError as error:
            raise ProtocolError(str(error)) from error


class MessageRouter:
    """Maps each type of message to its handler."""

    def __init__(
        self,
        links: Links,
        registry: ActorRegistry,
        caller: Caller,
        callee: Callee,
        *,
        streams: StreamCaller,
        requests: Requests,
        watches: Watches,
        lifecycle: Lifecycle,
        answers: AskAnswers,
    ) -> None:
        self._lost = links.lost
        self._decoder = MessageDecoder()
        self._registry = registry
        self._caller = caller
        self._callee = callee
        self._requests = requests
        self._handlers: dict[type[Any], Handler] = {
            message.CallMessage: self._accept,
            message.TellMessage: self._accept,
            message.Cancel: self._cancel,
            message.Deadline: self._deadline,
            message.Reply: caller.reply,
            message.FailureMessage: lambda rank, failure, _: caller.failure(rank, failure),
            message.Credit: lambda rank, credit, _: caller.credit(rank, credit),
            message.Spawn: requests.spawn,
            message.EndMessage: lambda rank, end, _: requests.end(rank, end),
            message.WatchMessage: lambda rank, watch, _: lifecycle.watched(rank, watch),
            message.Unwatch: lambda rank, unwatch, _: lifecycle.unwatched(rank, unwatch.watch),
            message.Yield: streams.item,
            message.YieldCredit: self._yield_credit,
            message.FeedMessage: self._feed,
            message.FeedEnd: self._feed_end,
            message.FeedCredit: lambda rank, credit, _: streams.credit(rank, credit),
            message.Abandon: lambda _, abandon, __: lifecycle.groups.abandon(abandon),
            message.AskInquiry: lambda rank, inquiry, _: answers.answer(rank, inquiry),
            message.AskAnswer: lambda rank, answer, _: caller.waits.receive(rank, answer),
            message.Downed: lambda rank, downed, _: watches.downed(rank, downed),
        }

    def receive(self, rank: int, payload: memoryview, release: Callable[[], None]) -> None:
        """Handle a message of a link.  Its share of the link's budget is returned at once: see ``window``."""
        release()
        if rank not in self._lost:
            self.dispatch(rank, payload)

    def dispatch(self, rank: int, payload: memoryview) -> None:
        """Handle a message of ``rank``.  Raises ``ProtocolError``, which closes the connection."""
        received = self._decoder.decode(payload)
        self._handlers[type(received)](rank, received, payload)

    def _accept(self, rank: int, received: message.CallMessage | message.TellMessage, payload: memoryview) -> None:
        """Put a call or tell into the mailbox of its actor, or refuse it."""
        cell = self._registry.cells.get(received.actor)
        if cell is None:
            self._callee.refuse_absent(rank, received, payload, *self._registry.absence(received.actor))
            return
        delivery = self._callee.accept(rank, received, payload, cell.ending)
        if delivery is not None:
            cell.put(delivery)

    def _cancel(self, rank: int, cancel: message.Cancel, _: memoryview) -> None:
        self._callee.cancel(rank, cancel.call)
        self._requests.cancel(rank, cancel.call)

    def _deadline(self, rank: int, deadline: message.Deadline, _: memoryview) -> None:
        when = None if math.isinf(deadline.seconds) else asyncio.get_running_loop().time() + deadline.seconds
        delivery = self._callee.move_deadline(rank, deadline.call, when)
        if delivery is not None and delivery.asks:
            self._caller.deadlines.tighten(delivery.asks, when)

    def _yield_credit(self, rank: int, credit: message.YieldCredit, _: memoryview) -> None:
        streams = self._served(rank, credit.call)
        if streams is not None:
            streams.credit(credit.amount)

    def _feed(self, rank: int, feed: message.FeedMessage, payload: memoryview) -> None:
        streams = self._served(rank, feed.call)
        if streams is not None:
            streams.feed(feed, payload)

    def _feed_end(self, rank: int, end: message.FeedEnd, _: memoryview) -> None:
        streams = self._served(rank, end.call)
        if streams is not None:
            streams.feed_end(end)

    def _served(self, rank: int, call: int) -> ServedStreams | None:
        """Return the streams of a call; None if it is over."""
        delivery = self._callee.find(rank, call)
        if delivery is None:
            return None
        if delivery.streams is None:
            raise ProtocolError(f"stream: rank {rank} streams to call {call}, which is not open for that")
        return delivery.streams
