"""The callee's half of an actor system: calls and tells on their way into mailboxes, answers on their way out."""

from __future__ import annotations

import asyncio
from typing import Final, cast

import msgspec

from asyncpar.collectives.offload import LONG_BYTES, write_payload
from asyncpar.errors import AsyncparError, PeerCancelled, PeerLost, PeerTimeout, ProtocolError, UsageError
from asyncpar.runtime import message
from asyncpar.runtime.dead_letters import DeadLetter, DeadLetters
from asyncpar.runtime.deadlines.alarm import AlarmClock
from asyncpar.runtime.delivery import Delivery
from asyncpar.runtime.executor import Answers
from asyncpar.runtime.failure import describe_failure, describe_unsendable, error_text, sendable
from asyncpar.runtime.outbound import Line, Post
from asyncpar.runtime.registry import Roster
from asyncpar.runtime.streams.served import ServedStreams
from asyncpar.runtime.window import ReceiveWindow
from asyncpar.transport.links import MAX_MESSAGE_BYTES
from asyncpar.wire.payload import Extension, PayloadEncoder

GRACE: Final = 0.25
"""Seconds for which a call outlives its deadline: its caller cancels it, or moves the deadline, if it still can."""


class Callee(Answers):
    """The actors of one rank and the calls they serve.  Every call gets one answer, unless its caller has gone."""

    def __init__(self, roster: Roster, *, rank: int, extension: Extension, post: Post) -> None:
        self.dead_letters = DeadLetters()
        self._roster = roster
        self._rank = rank
        self._extension = extension
        self._post = post
        self._serving: dict[tuple[int, int], Delivery] = {}
        self._windows: dict[tuple[int, str], ReceiveWindow] = {}
        self._expiry = AlarmClock[tuple[int, int]](self._expire)
        self._is_closing = False

    @property
    def serving(self) -> int:
        """Calls that arrived and are not answered yet."""
        return len(self._serving)

    # -- in --------------------------------------------------------------------------------------------------------

    def accept(self, delivery: Delivery) -> None:
        """Put a call or tell into its mailbox, or refuse it.

        Raises ``ProtocolError`` for a call that is being served already and for more than the window allows.
        """
        if delivery.call is not None and (delivery.sender, delivery.call) in self._serving:
            raise ProtocolError(f"actor message: rank {delivery.sender} sent call {delivery.call} twice")
        cell = self._roster.cells.get(delivery.actor)
        if cell is None:
            self._return_credit(delivery.sender, delivery.actor, delivery.cost)
            self.refused(delivery, *self._absence(delivery.actor))
            return
        self._window(delivery.sender, delivery.actor).receive(delivery.cost)
        if cell.ending.has_begun:
            self.taken(delivery)
            self.refused(delivery, cell.ending.refusal, cell.ending.epitaph)
            return
        if delivery.call is not None:
            self._serving[delivery.sender, delivery.call] = delivery
            if delivery.deadline is not None:
                self._expiry.set((delivery.sender, delivery.call), delivery.deadline + GRACE)
        cell.put(delivery)

    def find(self, rank: int, call: int) -> Delivery | None:
        """Return the call of ``rank`` that is being served, if it still is."""
        return self._serving.get((rank, call))

    def cancel(self, rank: int, call: int) -> None:
        """The caller does not want the answer any more."""
        self._drop((rank, call), PeerCancelled(f"rank {rank} cancelled the call", rank=rank))

    def move_deadline(self, rank: int, call: int, deadline: float | None) -> Delivery | None:
        """The caller will wait until ``deadline``, which may have passed; return the call, if it is still served."""
        delivery = self._serving.get((rank, call))
        if delivery is not None:
            delivery.deadline = deadline
            if deadline is None:
                self._expiry.drop((rank, call))
            else:
                self._expiry.set((rank, call), deadline + GRACE)
        return delivery

    def peer_lost(self, rank: int, error: PeerLost) -> None:
        """Cancel what a lost rank asked for.  What it told is still done."""
        for place in [place for place in self._serving if place[0] == rank]:
            self._drop(place, error)

    def begin_closing(self) -> None:
        """The node closes: whoever is not here any more was closed with it."""
        self._is_closing = True

    # -- cells' side (Answers) -------------------------------------------------------------------------------------

    def taken(self, delivery: Delivery) -> None:
        owed = self._window(delivery.sender, delivery.actor).take(delivery.cost)
        self._return_credit(delivery.sender, delivery.actor, owed)

    async def answered(self, delivery: Delivery, value: object, *, may_change: bool) -> None:
        if delivery.call is None or not self._finish(delivery):
            return
        encoder = PayloadEncoder(extension=self._extension, limit=MAX_MESSAGE_BYTES)
        what = f"the result of {delivery.endpoint}()"
        try:
            reply = message.Reply(delivery.call, cast(msgspec.Raw, encoder.typed(value, what=what)))
            payload = encoder.prepare(reply, what=what)
        except UsageError as error:
            self._post.say(delivery.sender, describe_unsendable(delivery.call, self._refusal(value, what) or error))
            return
        del value
        try:
            is_soon = may_change or payload.nbytes <= LONG_BYTES
            content = payload.write() if is_soon else await write_payload(payload)
        except asyncio.CancelledError:  # the caller is to be told all the same
            self._post.say(delivery.sender, message.Failure(delivery.call, message.CLOSED, "the node was closed"))
            raise
        del payload
        self._post.send_quietly(delivery.sender, content)

    def _refusal(self, value: object, what: str) -> UsageError | None:
        """Return why ``value`` cannot be sent, in words about itself and not about the message that it stood in."""
        try:
            PayloadEncoder(extension=self._extension).part(value, what=what)
        except UsageError as error:
            return error
        return None

    def raised(self, delivery: Delivery, error: BaseException) -> None:
        assert delivery.call is not None, "what a told endpoint raises is a failure of its actor"
        if not self._finish(delivery):
            return
        if delivery.streams is not None and delivery.streams.blames_caller(error):
            self._post.say(delivery.sender, message.Failure(delivery.call, message.USAGE, error_text(error)))
        else:
            self._post.say(delivery.sender, describe_failure(delivery.call, error))

    def open_streams(self, delivery: Delivery) -> None:
        if delivery.call is not None:
            line = Line(self._post, delivery.sender, self._extension)
            delivery.streams = ServedStreams(delivery.call, line=line, title=delivery.title)

    def refused(self, delivery: Delivery, reason: str, text: str) -> None:
        if delivery.call is None:
            letter = DeadLetter(delivery.sender, self._rank, delivery.actor, delivery.endpoint, text)
            self.dead_letters.add(letter)
        elif self._finish(delivery):
            self._post.say(delivery.sender, message.Failure(delivery.call, reason, sendable(text)))

    def settle(self, name: str) -> None:
        """The actor called ``name`` is gone: return what its senders are owed."""
        for rank, actor in [place for place in self._windows if place[1] == name]:
            self._return_credit(rank, actor, self._windows.pop((rank, actor)).settle())

    # -- inside ----------------------------------------------------------------------------------------------------

    def _absence(self, actor: str) -> tuple[str, str]:
        """Say why ``actor`` is not here: the reason and the text of a failure."""
        if self._is_closing:
            return message.CLOSED, "the node was closed"
        epitaph = self._roster.epitaph(actor)
        if epitaph is not None:
            return message.STOPPED, epitaph
        return message.ABSENT, f"there is no actor {actor!r} on rank {self._rank}"

    def _window(self, sender: int, actor: str) -> ReceiveWindow:
        place = (sender, actor)
        window = self._windows.get(place)
        if window is None:
            window = self._windows[place] = ReceiveWindow()
        return window

    def _return_credit(self, rank: int, actor: str, amount: int) -> None:
        if amount:
            self._post.say(rank, message.Credit(actor, amount))

    def _finish(self, delivery: Delivery) -> bool:
        """The call is over; does anybody wait for the answer?"""
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
        """The deadline of a call has passed, and nothing was heard of its caller."""
        rank, call = place
        delivery = self._drop(place, PeerTimeout(f"rank {rank} waits no longer", rank=rank))
        if delivery is not None:
            what = "waited in the mailbox" if delivery.execution is None else "ran"
            self._post.say(rank, message.Failure(call, message.DEADLINE, f"the deadline passed while it {what}"))
