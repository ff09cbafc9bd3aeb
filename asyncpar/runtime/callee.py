"""The callee's half of an actor system: calls and tells on their way into mailboxes, answers on their way out."""

from __future__ import annotations

import logging

from asyncpar.errors import ProtocolError, UsageError
from asyncpar.runtime import message
from asyncpar.runtime.cell import Cell, Delivery
from asyncpar.runtime.failure import describe_failure
from asyncpar.runtime.post import Post
from asyncpar.runtime.window import ReceiveWindow
from asyncpar.transport.links import MAX_MESSAGE_BYTES
from asyncpar.wire.payload import Extension, PayloadEncoder

_LOG = logging.getLogger(__name__)


class Callee:
    """The actors of one rank and the calls they serve.  Every call gets one answer, unless its caller has gone."""

    def __init__(self, rank: int, *, extension: Extension, post: Post) -> None:
        self.cells: dict[str, Cell] = {}
        """The actors by name, oldest first."""
        self._rank = rank
        self._extension = extension
        self._post = post
        self._serving: dict[tuple[int, int], tuple[Cell, Delivery]] = {}
        self._windows: dict[tuple[int, str], ReceiveWindow] = {}
        self._is_closing = False

    @property
    def serving(self) -> int:
        """Calls that arrived and are not answered yet."""
        return len(self._serving)

    # -- in --------------------------------------------------------------------------------------------------------

    def accept(self, actor: str, delivery: Delivery) -> None:
        """Put a call or tell into its mailbox, or refuse it.

        Raises ``ProtocolError`` for a call that is being served already and for more than the window allows.
        """
        if delivery.call is not None and (delivery.sender, delivery.call) in self._serving:
            raise ProtocolError(f"actor message: rank {delivery.sender} sent call {delivery.call} twice")
        cell = self.cells.get(actor)
        if cell is None:
            self._return_credit(delivery.sender, actor, delivery.cost)
            reason = message.CLOSED if self._is_closing else message.USAGE
            text = "the node was closed" if self._is_closing else f"there is no actor {actor!r} on rank {self._rank}"
            self._refuse(actor, delivery, reason, text)
            return
        self._window(delivery.sender, actor).receive(delivery.cost)
        if cell.is_stopping:
            self.taken(cell, delivery)
            self._refuse(actor, delivery, message.STOPPED, "the actor was stopped")
            return
        if delivery.call is not None:
            self._serving[delivery.sender, delivery.call] = cell, delivery
        cell.put(delivery)

    def cancel(self, rank: int, call: int) -> None:
        """The caller does not want the answer any more."""
        serving = self._serving.pop((rank, call), None)
        if serving is not None:
            cell, delivery = serving
            cell.cancel(delivery)

    def peer_lost(self, rank: int) -> None:
        """Cancel what a lost rank asked for.  What it told is still done."""
        for sender, call in [place for place in self._serving if place[0] == rank]:
            self.cancel(sender, call)

    async def close(self) -> None:
        """End every actor, newest first, cancelling what it does."""
        self._is_closing = True
        for cell in reversed(list(self.cells.values())):
            cell.close()
            await cell.wait_ended()
            if cell.stop_error is not None:
                _LOG.error("rank %d: on_stop of actor %r raised", self._rank, cell.name, exc_info=cell.stop_error)

    # -- cells' side (CellEvents) ----------------------------------------------------------------------------------

    def taken(self, cell: Cell, delivery: Delivery) -> None:
        self._return_credit(delivery.sender, cell.name, self._window(delivery.sender, cell.name).take(delivery.cost))

    def answered(self, cell: Cell, delivery: Delivery, value: object) -> None:  # noqa: ARG002
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

    def raised(self, cell: Cell, delivery: Delivery, error: BaseException) -> None:
        if delivery.call is None:
            where = (self._rank, cell.name, delivery.endpoint, delivery.sender)
            _LOG.error("rank %d: actor %r: %s, told by rank %d, raised", *where, exc_info=error)
        elif self._finish(delivery):
            self._post.say(delivery.sender, describe_failure(delivery.call, error))

    def refused(self, cell: Cell, delivery: Delivery, reason: str, text: str) -> None:
        self._refuse(cell.name, delivery, reason, text)

    def ended(self, cell: Cell) -> None:
        del self.cells[cell.name]
        for rank, actor in [place for place in self._windows if place[1] == cell.name]:
            self._return_credit(rank, actor, self._windows.pop((rank, actor)).settle())

    # -- inside ----------------------------------------------------------------------------------------------------

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

    def _refuse(self, actor: str, delivery: Delivery, reason: str, text: str) -> None:
        if delivery.call is None:
            where = (self._rank, actor, delivery.endpoint, delivery.sender)
            _LOG.warning("rank %d: actor %r: %s, told by rank %d, was not done: %s", *where, text)
        elif self._finish(delivery):
            self._post.say(delivery.sender, message.Failure(delivery.call, reason, text))
