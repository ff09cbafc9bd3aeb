"""The called half of an actor system: accepts calls and tells, sends answers."""

from __future__ import annotations

import asyncio
from typing import Final, cast

import msgspec

from asyncpar.actors.runtime import message
from asyncpar.actors.runtime.call_streams import ServedStreams
from asyncpar.actors.runtime.calls import Delivery
from asyncpar.actors.runtime.dead_letters import DeadLetter, DeadLetters
from asyncpar.actors.runtime.deadlines import AlarmClock
from asyncpar.actors.runtime.ending import Ending
from asyncpar.actors.runtime.failure import describe_failure, describe_unsendable, error_text, sendable
from asyncpar.actors.runtime.outbound import Outbound, ReplyChannel
from asyncpar.actors.runtime.window import ReceiveWindow, message_cost
from asyncpar.core.concurrency.tasks import INLINE_COPY_BYTES, off_loop
from asyncpar.core.observe.records import EventKind, EventState
from asyncpar.errors import AsyncparError, PeerCancelled, PeerLost, PeerTimeout, ProtocolError, UsageError
from asyncpar.net.transport.links import MAX_MESSAGE_BYTES
from asyncpar.net.wire.payload import Extension, PayloadEncoder

GRACE: Final = 0.25
"""Seconds after its deadline at which a call is ended; until then its caller may cancel it or move the deadline."""


class Callee:
    """Calls served by actors of this rank.  Every call gets one answer, unless its caller cancelled it or was lost."""

    def __init__(self, *, rank: int, extension: Extension, outbound: Outbound) -> None:
        self.dead_letters = DeadLetters()
        self._rank = rank
        self._extension = extension
        self._outbound = outbound
        self._serving: dict[tuple[int, int], Delivery] = {}
        self._windows: dict[tuple[int, str], ReceiveWindow] = {}
        self._expiry = AlarmClock[tuple[int, int]](self._expire)

    @property
    def serving(self) -> int:
        """Number of calls that have arrived and are not answered yet."""
        return len(self._serving)

    # -- incoming --------------------------------------------------------------------------------------------------

    def accept(
        self, sender: int, received: message.CallMessage | message.TellMessage, payload: memoryview, ending: Ending
    ) -> Delivery | None:
        """Count a call or tell for an actor and return it; None if it was refused because the actor is ``ending``.

        Raises ``ProtocolError`` for a call that is already being served and for more than the window allows.
        """
        place = (sender, received.actor)
        window = self._windows.get(place)
        if window is None:
            window = self._windows[place] = ReceiveWindow()
        delivery = self._make(sender, received, payload, window)
        window.receive(delivery.cost)
        if ending.has_begun:
            self.taken(delivery)
            self.refused(delivery, ending.refusal, ending.exit_reason)
            return None
        if delivery.call is not None:
            self._serving[delivery.sender, delivery.call] = delivery
            if delivery.deadline is not None:
                self._expiry.set((delivery.sender, delivery.call), delivery.deadline + GRACE)
        return delivery

    def refuse_absent(
        self,
        sender: int,
        received: message.CallMessage | message.TellMessage,
        payload: memoryview,
        reason: str,
        text: str,
    ) -> None:
        """Refuse a call or tell for an actor that does not exist.  Raises ``ProtocolError`` as ``accept``."""
        delivery = self._make(sender, received, payload, ReceiveWindow())
        self.return_credit(delivery.sender, delivery.actor, delivery.cost)
        self.refused(delivery, reason, text)

    def begin(self, delivery: Delivery) -> int:
        """Record that an endpoint begins to run; return the ticket for ``end``."""
        number = 0 if delivery.call is None else delivery.call
        return self._outbound.recorder.begin_call(
            EventKind.HANDLE,
            delivery.actor,
            delivery.endpoint,
            caller=delivery.sender,
            call=number,
            peer=delivery.sender,
        )

    def end(self, ticket: int, state: EventState) -> None:
        """Record the end of the endpoint of ``begin``."""
        self._outbound.recorder.end(ticket, state)

    def find(self, rank: int, call: int) -> Delivery | None:
        """Return the call of ``rank`` that is being served, if it still is."""
        return self._serving.get((rank, call))

    def cancel(self, rank: int, call: int) -> None:
        """Cancel the call of ``rank``."""
        self._drop((rank, call), PeerCancelled(f"rank {rank} cancelled the call", rank=rank))

    def move_deadline(self, rank: int, call: int, deadline: float | None) -> Delivery | None:
        """Set the deadline of a call, which may have passed; return the call, if it is still served."""
        delivery = self._serving.get((rank, call))
        if delivery is not None:
            delivery.deadline = deadline
            if deadline is None:
                self._expiry.drop((rank, call))
            else:
                self._expiry.set((rank, call), deadline + GRACE)
        return delivery

    def peer_lost(self, rank: int, error: PeerLost) -> None:
        """Cancel the calls of a lost rank.  Its tells are still handled."""
        for place in [place for place in self._serving if place[0] == rank]:
            self._drop(place, error)

    # -- answers -----------------------------------------------------------------------------------------------------

    def return_credit(self, rank: int, actor: str, amount: int) -> None:
        """Notify ``rank`` that messages from it to ``actor`` that cost ``amount`` were taken; 0 sends nothing."""
        if amount:
            self._outbound.send_message(rank, message.Credit(actor, amount))

    def taken(self, delivery: Delivery) -> None:
        """Return the credit of a delivery that was taken from the mailbox."""
        self.return_credit(delivery.sender, delivery.actor, delivery.window.take(delivery.cost))

    async def answered(self, delivery: Delivery, value: object, *, may_change: bool) -> None:
        """Send ``value`` as the answer.  Returns when it is copied: at once if it ``may_change``."""
        if delivery.call is None or not self._finish(delivery):
            return
        encoder = PayloadEncoder(extension=self._extension, limit=MAX_MESSAGE_BYTES)
        what = f"the result of {delivery.endpoint}()"
        try:
            reply = message.Reply(delivery.call, cast(msgspec.Raw, encoder.typed(value, what=what)))
            payload = encoder.prepare(reply, what=what)
        except UsageError as error:
            self._outbound.send_message(
                delivery.sender, describe_unsendable(delivery.call, self._refusal(value, what) or error)
            )
            return
        del value
        try:
            is_inline = may_change or payload.nbytes <= INLINE_COPY_BYTES
            content = payload.write() if is_inline else await off_loop(payload.write, nbytes=payload.nbytes)
        except asyncio.CancelledError:  # the caller gets an answer nevertheless
            self._outbound.send_message(
                delivery.sender, message.FailureMessage(delivery.call, message.CLOSED, "the node was closed")
            )
            raise
        except MemoryError as error:
            self._outbound.send_message(delivery.sender, describe_unsendable(delivery.call, error, what=what))
            return
        del payload
        self._outbound.send_quietly(delivery.sender, content)

    def _refusal(self, value: object, what: str) -> UsageError | None:
        """Return the reason why ``value`` cannot be sent, in terms of the value, not of the message around it."""
        try:
            PayloadEncoder(extension=self._extension).part(value, what=what)
        except UsageError as error:
            return error
        return None

    def raised(self, delivery: Delivery, error: BaseException) -> None:
        """Answer an ask whose endpoint raised ``error``."""
        assert delivery.call is not None, "what a told endpoint raises is a failure of its actor"
        if not self._finish(delivery):
            return
        if delivery.streams is not None and delivery.streams.blames_caller(error):
            self._outbound.send_message(
                delivery.sender, message.FailureMessage(delivery.call, message.USAGE, error_text(error))
            )
        else:
            self._outbound.send_message(delivery.sender, describe_failure(delivery.call, error))

    def open_streams(self, delivery: Delivery) -> None:
        """Make ``delivery.streams``, unless it was told."""
        if delivery.call is not None:
            channel = ReplyChannel(self._outbound, delivery.sender, self._extension)
            delivery.streams = ServedStreams(delivery.call, channel=channel, title=delivery.title)

    def refused(self, delivery: Delivery, reason: str, text: str) -> None:
        """Answer, for a ``reason`` of ``message``, that the endpoint was not called, or not to its end."""
        if delivery.call is None:
            letter = DeadLetter(delivery.sender, self._rank, delivery.actor, delivery.endpoint, text)
            self.dead_letters.add(letter)
        elif self._finish(delivery):
            self._outbound.send_message(delivery.sender, message.FailureMessage(delivery.call, reason, sendable(text)))

    def settle(self, name: str) -> None:
        """Return the outstanding credit to the senders of the actor called ``name``, which has ended."""
        for rank, actor in [place for place in self._windows if place[1] == name]:
            self.return_credit(rank, actor, self._windows.pop((rank, actor)).settle())

    # -- internals -------------------------------------------------------------------------------------------------

    def _make(
        self,
        sender: int,
        received: message.CallMessage | message.TellMessage,
        payload: memoryview,
        window: ReceiveWindow,
    ) -> Delivery:
        call, deadline, wants_stream = None, None, False
        if type(received) is message.CallMessage:
            call, wants_stream = received.call, received.wants_stream
            if (sender, call) in self._serving:
                raise ProtocolError(f"actor message: rank {sender} sent call {call} twice")
            if received.seconds is not None:
                deadline = asyncio.get_running_loop().time() + received.seconds
        return Delivery(
            sender,
            call,
            received.actor,
            received.endpoint,
            received.arguments,
            received.keywords,
            payload,
            window,
            message_cost(payload),
            deadline,
            wants_stream,
        )

    def _finish(self, delivery: Delivery) -> bool:
        """Remove the call; return False if it was cancelled, so that no answer may be sent."""
        if delivery.call is not None and not delivery.is_cancelled:
            self._serving.pop((delivery.sender, delivery.call), None)
            self._expiry.drop((delivery.sender, delivery.call))
        return not delivery.is_cancelled

    def _drop(self, place: tuple[int, int], reason: AsyncparError) -> Delivery | None:
        """Cancel a call, if it is still served, and return it."""
        delivery = self._serving.pop(place, None)
        if delivery is not None:
            self._expiry.drop(place)
            delivery.cancel(reason)
        return delivery

    def _expire(self, place: tuple[int, int]) -> None:
        """End a call whose deadline has passed and that its caller has not cancelled."""
        rank, call = place
        delivery = self._drop(place, PeerTimeout(f"rank {rank} waits no longer", rank=rank))
        if delivery is not None:
            what = "waited in the mailbox" if delivery.execution is None else "ran"
            self._outbound.send_message(
                rank, message.FailureMessage(call, message.DEADLINE, f"the deadline passed while it {what}")
            )
