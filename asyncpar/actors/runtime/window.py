"""How many messages may wait for an actor: one window per sending rank and receiving actor.

Theory of operation.  Every call and tell costs its size plus an overhead.  The sender lets messages go while those that
the actor has not taken from its mailbox cost less than ``WINDOW``; the others queue at the sender, in order.  The
receiver returns credit for what was taken, in lumps of at least a quarter of the window.  So a slow actor slows its
senders down, its mailbox holds at most a window and one message per sending rank, and a lump that is not full yet never
holds back a sender.

The credit of the link is not used for this, on purpose: it is shared by all actors and by replies, and an actor that
waits for a reply while its mailbox holds all credit would wait for ever.

The module decides only.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from asyncpar.errors import ProtocolError, UsageError
from asyncpar.net.transport.lane import Sending
from asyncpar.net.wire.frame import Payload

WINDOW: Final = 16 << 20
"""Part of the protocol: equal on all ranks."""
OVERHEAD: Final = 1024
MAX_QUEUED_MESSAGES: Final = 65_536
MAX_QUEUED_BYTES: Final = 256 << 20


@dataclass(slots=True, eq=False)
class OutboundMessage:
    """A call or tell on its way to an actor."""

    payload: Payload
    is_sent: bool = False
    sending: Sending | None = None
    """What the link still does with it."""

    @property
    def cost(self) -> int:
        return message_cost(self.payload)


def message_cost(payload: Payload) -> int:
    """Return what a message takes out of the window."""
    return len(payload) + OVERHEAD


class SendWindow:
    """The sender's end: decide which messages for one actor may travel."""

    def __init__(self) -> None:
        self.is_sending = False
        """Is somebody in the middle of sending what ``next`` gives?"""
        self._queue: OrderedDict[OutboundMessage, None] = OrderedDict()
        self._queued_bytes = 0
        self._travelling = 0

    @property
    def is_idle(self) -> bool:
        """Is nothing under way or waiting, so that the window may be forgotten?"""
        return not self._queue and self._travelling == 0

    @property
    def is_full(self) -> bool:
        """Has the queue grown so long that nothing may be added without waiting for its turn?"""
        return len(self._queue) >= MAX_QUEUED_MESSAGES or self._queued_bytes >= MAX_QUEUED_BYTES

    def put(self, outgoing: OutboundMessage) -> bool:
        """Return True if ``outgoing`` may travel now; otherwise it is queued."""
        if not self._queue and self._travelling < WINDOW:
            self._release(outgoing)
            return True
        self._queue[outgoing] = None
        self._queued_bytes += len(outgoing.payload)
        return False

    def drop(self, outgoing: OutboundMessage) -> bool:
        """Take ``outgoing`` out of the queue; False if it has left."""
        if outgoing.is_sent or outgoing not in self._queue:
            return False
        del self._queue[outgoing]
        self._queued_bytes -= len(outgoing.payload)
        return True

    def credit(self, amount: int) -> None:
        """The actor took messages that cost ``amount``: see ``next``.  Raises ``ProtocolError`` for too many."""
        if amount > self._travelling:
            raise ProtocolError(f"actor credit: {self._travelling} are outstanding, the peer returned {amount}")
        self._travelling -= amount

    def next(self) -> OutboundMessage | None:
        """Return the first outgoing of the queue if it may travel now."""
        if not self._queue or self._travelling >= WINDOW:
            return None
        outgoing, _ = self._queue.popitem(last=False)
        self._queued_bytes -= len(outgoing.payload)
        self._release(outgoing)
        return outgoing

    def clear(self) -> list[OutboundMessage]:
        """Forget everything: the peer is lost.  Return the messages that never left."""
        queued = list(self._queue)
        self._queue.clear()
        self._queued_bytes = self._travelling = 0
        return queued

    def check_room(self, what: str) -> None:
        """Raise ``UsageError`` naming ``what`` if nothing may be added without waiting."""
        if self.is_full:
            raise UsageError(
                f"{what}: {len(self._queue)} messages ({self._queued_bytes} bytes) wait to be sent to this actor; "
                "await the tells, so that a slow actor slows them down"
            )

    def _release(self, outgoing: OutboundMessage) -> None:
        outgoing.is_sent = True
        self._travelling += outgoing.cost


class ReceiveWindow:
    """The receiver's end: check that the sender keeps to its window, and return credit in lumps.

    One that ``is_shut`` lets nothing come before ``settle`` has given its first credit.
    """

    def __init__(self, size: int = WINDOW, *, is_shut: bool = False) -> None:
        self._size = size
        self._held = self._owed = size if is_shut else 0

    def receive(self, cost: int) -> None:
        """A message arrived.  Raises ``ProtocolError`` if the sender had no room for it."""
        if self._held >= self._size:
            raise ProtocolError(f"actor messages: the peer overspent its window of {self._size} bytes")
        self._held += cost

    def take(self, cost: int) -> int:
        """A message left the mailbox; return the credit to send now, 0 for none."""
        self._owed += cost
        return self.settle() if self._owed >= self._size // 4 else 0

    def settle(self) -> int:
        """Return all credit that is owed, 0 for none."""
        owed, self._owed = self._owed, 0
        self._held -= owed
        return owed
