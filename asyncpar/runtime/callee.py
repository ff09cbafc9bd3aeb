"""The callee's half of an actor system: calls and tells on their way into mailboxes, answers on their way out."""

from __future__ import annotations

from asyncpar.errors import ProtocolError, UsageError
from asyncpar.runtime import message
from asyncpar.runtime.dead_letters import DeadLetter, DeadLetters
from asyncpar.runtime.delivery import Delivery
from asyncpar.runtime.failure import describe_failure
from asyncpar.runtime.handler import Answers
from asyncpar.runtime.post import Post
from asyncpar.runtime.roster import Roster
from asyncpar.runtime.window import ReceiveWindow
from asyncpar.transport.links import MAX_MESSAGE_BYTES
from asyncpar.wire.payload import Extension, PayloadEncoder


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
        cell.put(delivery)

    def find(self, rank: int, call: int) -> Delivery | None:
        """Return the call of ``rank`` that is being served, if it still is."""
        return self._serving.get((rank, call))

    def cancel(self, rank: int, call: int) -> None:
        """The caller does not want the answer any more."""
        delivery = self._serving.pop((rank, call), None)
        if delivery is not None:
            delivery.cancel()

    def peer_lost(self, rank: int) -> None:
        """Cancel what a lost rank asked for.  What it told is still done."""
        for sender, call in [place for place in self._serving if place[0] == rank]:
            self.cancel(sender, call)

    def begin_closing(self) -> None:
        """The node closes: whoever is not here any more was closed with it."""
        self._is_closing = True

    # -- cells' side (Answers) -------------------------------------------------------------------------------------

    def taken(self, delivery: Delivery) -> None:
        owed = self._window(delivery.sender, delivery.actor).take(delivery.cost)
        self._return_credit(delivery.sender, delivery.actor, owed)

    def answered(self, delivery: Delivery, value: object) -> None:
        if delivery.call is None or not self._finish(delivery):
            return
        encoder = PayloadEncoder(extension=self._extension, limit=MAX_MESSAGE_BYTES)
        what = f"the result of {delivery.endpoint}()"
        try:
            reply = message.Reply(delivery.call, encoder.part(value, what=what))
            payload = encoder.finish(reply, what=what)
        except UsageError as error:
            self._post.say(delivery.sender, describe_failure(delivery.call, error))
        else:
            self._post.send_quietly(delivery.sender, payload)

    def raised(self, delivery: Delivery, error: BaseException) -> None:
        assert delivery.call is not None, "what a told endpoint raises is a failure of its actor"
        if self._finish(delivery):
            self._post.say(delivery.sender, describe_failure(delivery.call, error))

    def refused(self, delivery: Delivery, reason: str, text: str) -> None:
        if delivery.call is None:
            letter = DeadLetter(delivery.sender, self._rank, delivery.actor, delivery.endpoint, text)
            self.dead_letters.add(letter)
        elif self._finish(delivery):
            self._post.say(delivery.sender, message.Failure(delivery.call, reason, text))

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
        return message.USAGE, f"there is no actor {actor!r} on rank {self._rank}"

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
        return not delivery.is_cancelled
