"""The calling half of an actor system: sends calls and tells, receives answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from asyncpar.actors.runtime import message
from asyncpar.actors.runtime.ask_waits import AskWaits
from asyncpar.actors.runtime.calls import CURRENT, EncodedArguments, PendingCall, QueuedTell, time_left
from asyncpar.actors.runtime.deadlines import CallDeadlines
from asyncpar.actors.runtime.failure import error_of, lost_during
from asyncpar.actors.runtime.outbound import Outbound
from asyncpar.actors.runtime.ref import ActorRef, Told
from asyncpar.actors.runtime.window import OutboundMessage, SendWindow
from asyncpar.core.concurrency.tasks import INLINE_COPY_BYTES, off_loop
from asyncpar.core.observe.records import EventKind, EventState
from asyncpar.errors import NodeClosed, PeerLost, ProtocolError, UsageError
from asyncpar.net.transport.lane import Sending
from asyncpar.net.transport.links import MAX_MESSAGE_BYTES
from asyncpar.net.wire.frame import Payload
from asyncpar.net.wire.payload import Extension, PayloadDecoder, PayloadEncoder, UnwrittenPayload


class Caller:
    """Sends calls to actors and ends each with its result or an error."""

    def __init__(self, rank: int, *, extension: Extension, outbound: Outbound) -> None:
        self._rank = rank
        self._extension = extension
        self._outbound = outbound
        self._pending: dict[int, PendingCall] = {}
        self.deadlines = CallDeadlines(self._pending, outbound)
        self._windows: dict[tuple[int, str], SendWindow] = {}
        self._told: dict[OutboundMessage, QueuedTell] = {}
        self._next_call = 0
        self.waits = AskWaits(rank, self._pending, outbound, lambda: self._next_call)
        self._is_closed = False

    @property
    def pending(self) -> int:
        """Number of asks that wait for an answer."""
        return sum(not pending.future.done() for pending in self._pending.values())

    # -- outgoing --------------------------------------------------------------------------------------------------

    async def ask(
        self,
        ref: ActorRef[Any],
        endpoint: str,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        result: PayloadDecoder[Any],
    ) -> Any:
        """Send a call and return its result, decoded by ``result``.  See ``ref.Endpoint`` for the errors."""
        pending = self.begin(ref, endpoint, arguments, keywords, result)
        try:
            if pending.outgoing is not None and not pending.outgoing.is_written:
                await self.write(pending)
            return await pending.future
        finally:
            self.end(pending)

    def begin(
        self,
        ref: ActorRef[Any],
        endpoint: str,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        result: PayloadDecoder[Any],
        *,
        wants_stream: bool = False,
    ) -> PendingCall:
        """Send a call, or queue it.  ``end`` must be called with the result, and ``write`` if it is not written."""
        self._check_open(ref, endpoint)
        call = self.new_call()
        encoder = PayloadEncoder(extension=self._extension, limit=MAX_MESSAGE_BYTES)
        finish = self._copy if wants_stream or ref.rank == self._rank else PayloadEncoder.finish_lent
        what = f"the call of {endpoint}"
        try:
            encoded: list[msgspec.Raw] = [encoder.typed(argument, what=what) for argument in arguments]
            named = keywords and {name: encoder.typed(argument, what=what) for name, argument in keywords.items()}
            envelope = message.CallMessage(call, ref.name, endpoint, encoded, named, time_left(), wants_stream)
            outgoing = OutboundMessage(finish(encoder, envelope, what=what))
        except UsageError as error:
            raise (self._refusal(endpoint, arguments, keywords) or error) from None
        origin, loop = CURRENT.get(), asyncio.get_running_loop()
        pending = self._pending[call] = PendingCall(call, ref, endpoint, result, loop.create_future(), outgoing, origin)
        if origin is not None:
            origin.asks = origin.asks or set()
            origin.asks.add(call)
        try:
            self._put(ref, endpoint, outgoing)
        except PeerLost:
            self._forget(pending)
            raise
        pending.ticket = self._outbound.recorder.begin_call(
            EventKind.ASK, ref.name, endpoint, caller=self._rank, call=call, peer=ref.rank
        )
        if not wants_stream:
            self.deadlines.begin(pending)
        return pending

    async def write(self, pending: PendingCall) -> None:
        """Copy the large arguments of a call in a thread, then send it; later messages to the actor wait behind it."""
        ref, outgoing = pending.ref, pending.outgoing
        if outgoing is None or not isinstance(content := outgoing.payload, UnwrittenPayload):
            return
        outgoing.payload = await off_loop(content.write, nbytes=content.nbytes)
        window = self._windows.get((ref.rank, ref.name))
        if window is not None and not window.is_sending:
            self._send_queued(ref.rank, window)

    @staticmethod
    def _copy(encoder: PayloadEncoder, envelope: object, *, what: str) -> Payload | UnwrittenPayload:
        """Return the payload with copies of its arrays; unwritten if copying them would block the loop."""
        content = encoder.prepare(envelope, what=what)
        return content.write() if content.nbytes <= INLINE_COPY_BYTES else content

    def end(self, pending: PendingCall) -> None:
        """Forget a call; one without an answer is withdrawn or cancelled at its actor."""
        self._forget(pending)
        if pending.future.done() and not pending.future.cancelled():
            has_failed = pending.future.exception() is not None  # retrieved: the caller may have been cancelled
            self._outbound.recorder.end(pending.ticket, EventState.FAILED if has_failed else EventState.COMPLETED)
        else:
            self._outbound.recorder.end(pending.ticket, EventState.CANCELLED)
            pending.future.cancel()
            self._withdraw(pending)
        if pending.outgoing is not None and pending.outgoing.sending is not None:
            pending.outgoing.sending.release()  # the arguments are no longer lent

    def tell(self, ref: ActorRef[Any], endpoint: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Told:
        """Send a call without an answer."""
        self._check_open(ref, endpoint)
        window = self._windows.get((ref.rank, ref.name))
        if window is not None:
            window.check_room(f"tell {endpoint} of {ref!r}")
        encoder, encoded, named = self.encode(endpoint, arguments, keywords)
        envelope = message.TellMessage(ref.name, endpoint, encoded, named)
        outgoing = OutboundMessage(encoder.finish(envelope, what=f"the call of {endpoint}"))
        told = QueuedTell(outgoing)
        if not self._put(ref, endpoint, outgoing):
            self._told[outgoing] = told
        return told

    async def request(
        self,
        ref: ActorRef[Any],
        verb: str,
        envelope: Callable[[int], message.Message],
        encoder: PayloadEncoder,
        result: PayloadDecoder[Any],
    ) -> Any:
        """Send a request about ``ref`` to its system: the message that ``envelope`` makes of the call's number."""
        self._check_open(ref, verb)
        call = self.new_call()
        content = encoder.prepare(envelope(call), what=verb)
        pending = PendingCall(call, ref, verb, result, asyncio.get_running_loop().create_future())
        self._pending[call] = pending  # now: this rank itself may answer at once
        try:
            payload = await off_loop(content.write, nbytes=content.nbytes, inline=INLINE_COPY_BYTES)
            if not pending.future.done():  # otherwise the rank was lost, or this node closed, meanwhile
                self._send(ref, verb, payload)
            return await pending.future
        except asyncio.CancelledError:
            if pending.future.done() and not pending.future.cancelled():  # the answer has come, but nothing takes it
                self._outbound.send_message(ref.rank, message.Cancel(call))
            raise
        finally:
            self.end(pending)

    def send_to(self, rank: int, envelope: message.Message) -> None:
        """Send a message without an answer to a rank that may be lost."""
        if not self._is_closed:
            self._outbound.send_message(rank, envelope)

    def encode(
        self, endpoint: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[PayloadEncoder, list[msgspec.Raw], dict[str, msgspec.Raw]]:
        """Return the arguments as encoded parts, with the encoder that finishes their message."""
        if isinstance(arguments, EncodedArguments):
            return arguments.encoder, arguments.positional, arguments.named
        encoder = PayloadEncoder(extension=self._extension, limit=MAX_MESSAGE_BYTES)
        encoded = [
            encoder.part(argument, what=f"argument {place} of {endpoint}()")
            for place, argument in enumerate(arguments, start=1)
        ]
        named = {
            name: encoder.part(argument, what=f"argument {name!r} of {endpoint}()")
            for name, argument in keywords.items()
        }
        return encoder, encoded, named

    def _refusal(self, endpoint: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> UsageError | None:
        """Return the error that names the argument that cannot be sent."""
        try:
            self.encode(endpoint, arguments, keywords)
        except UsageError as error:
            return error.with_traceback(None)
        return None

    def _put(self, ref: ActorRef[Any], endpoint: str, outgoing: OutboundMessage) -> bool:
        """Send ``outgoing`` or queue it; return True if it was sent."""
        place = (ref.rank, ref.name)
        window = self._windows.get(place)
        if window is None:
            window = self._windows[place] = SendWindow()
        if not window.put(outgoing):
            return False
        assert not isinstance(outgoing.payload, UnwrittenPayload), "the window lets only written messages pass"
        try:
            outgoing.sending = self._send(ref, endpoint, outgoing.payload)
        except PeerLost:
            self._windows.pop(place, None)
            raise
        return True

    def _send(self, ref: ActorRef[Any], verb: str, payload: Payload) -> Sending | None:
        try:
            return self._outbound.send(ref.rank, payload)
        except PeerLost as error:
            raise lost_during(error, f"{verb} of {ref!r}") from None

    def new_call(self) -> int:
        """Return a number for a call."""
        call = self._next_call
        self._next_call += 1
        if not self.waits.is_ticking:
            self.waits.begin(call)
        return call

    def _withdraw(self, pending: PendingCall) -> None:
        ref, outgoing = pending.ref, pending.outgoing
        window = None if outgoing is None else self._windows.get((ref.rank, ref.name))
        if window is not None and outgoing is not None and window.drop(outgoing):
            if not window.is_sending:  # messages behind one that is not written yet
                self._send_queued(ref.rank, window)
            return
        if (outgoing is not None and not outgoing.is_sent) or self._is_closed:
            return
        if outgoing is None or outgoing.sending is None or outgoing.sending.release():
            self._outbound.send_message(ref.rank, message.Cancel(pending.call))
        elif window is not None:
            self.credit(ref.rank, message.Credit(ref.name, outgoing.cost))  # it never left, so it needs no room there

    def _forget(self, pending: PendingCall) -> None:
        del self._pending[pending.call]
        self.deadlines.end(pending)
        if self.waits.reported:
            self.waits.over(pending)
        if pending.origin is not None and pending.origin.asks:
            pending.origin.asks.discard(pending.call)

    # -- incoming --------------------------------------------------------------------------------------------------

    def reply(self, rank: int, reply: message.Reply, payload: memoryview) -> None:
        """End a call with its result; ignored if the call is over."""
        pending = self.find(rank, reply.call)
        if pending is None:
            return
        try:
            value = pending.result.decode_part(reply.value, payload, what=pending)
        except (UsageError, ProtocolError) as error:
            pending.future.set_exception(error)
        else:
            pending.future.set_result(value)

    def failure(self, rank: int, failure: message.FailureMessage) -> None:
        """End a call with an error; ignored if the call is over."""
        pending = self.find(rank, failure.call)
        if pending is not None:
            pending.future.set_exception(error_of(failure, rank, pending.title))

    def credit(self, rank: int, credit: message.Credit) -> None:
        """Add the credit that an actor returned, and send messages that wait for it."""
        if self._is_closed:
            return
        place = (rank, credit.actor)
        window = self._windows.get(place)
        if window is None:
            raise ProtocolError(
                f"actor credit: rank {rank} returned {credit.amount} for an actor that was sent nothing"
            )
        window.credit(credit.amount)
        if not window.is_sending:
            self._send_queued(rank, window)
        if window.is_idle and self._windows.get(place) is window:
            del self._windows[place]

    def _send_queued(self, rank: int, window: SendWindow) -> None:
        """Send queued messages as far as credit allows.  Sending to this rank may return credit at once."""
        window.is_sending = True
        try:
            while (outgoing := window.next()) is not None:
                assert not isinstance(outgoing.payload, UnwrittenPayload), "the window lets only written messages pass"
                outgoing.sending = self._outbound.send_quietly(rank, outgoing.payload)
                self.deadlines.sent(outgoing)
                told = self._told.pop(outgoing, None)
                if told is not None:
                    told.wake()
        finally:
            window.is_sending = False

    def peer_lost(self, rank: int, error: PeerLost) -> None:
        """End all calls and messages to ``rank``, which was lost."""
        for pending in list(self._pending.values()):
            if pending.ref.rank == rank and not pending.future.done():
                pending.future.set_exception(lost_during(error, pending.title))
        for place in [place for place in self._windows if place[0] == rank]:
            for outgoing in self._windows.pop(place).clear():
                told = self._told.pop(outgoing, None)
                if told is not None:
                    told.error = error
                    told.wake()

    def close(self) -> None:
        """End all calls and refuse new ones."""
        self._is_closed = True
        self.deadlines.close()
        self.waits.close()
        for rank in {pending.ref.rank for pending in self._pending.values()} | {rank for rank, _ in self._windows}:
            self.peer_lost(rank, self._closed())

    def asks_of(self, actor: str) -> list[PendingCall]:
        """Return the asks that endpoints of ``actor``, on this rank, wait for, oldest first."""
        return [
            pending
            for pending in self._pending.values()
            if pending.origin is not None and pending.origin.actor == actor and not pending.future.done()
        ]

    def find(self, rank: int, call: int) -> PendingCall | None:
        """Return the pending ``call``; None if it is over.

        Raises ``ProtocolError`` if ``rank`` is not the one that was called.
        """
        pending = self._pending.get(call)
        if pending is None or pending.future.done():
            return None
        if pending.ref.rank != rank:
            raise ProtocolError(f"actor message: rank {rank} answers call {call}, which rank {pending.ref.rank} got")
        return pending

    # -- internals -------------------------------------------------------------------------------------------------

    def _check_open(self, ref: ActorRef[Any], endpoint: str) -> None:
        if self._is_closed:
            raise lost_during(self._closed(), f"{endpoint} of {ref!r}")

    def _closed(self) -> PeerLost:
        return NodeClosed.of(self._rank)
