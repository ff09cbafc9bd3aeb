"""Flow control of actor messages and of stream items: windows of credit.

Messages.  There is one window per sending rank and receiving actor.  Every call and tell costs its size plus
``OVERHEAD``.  The sender sends while the messages that the actor has not taken from its mailbox cost less than
``WINDOW``; later ones queue at the sender, in order.  The receiver returns credit for messages taken, in lumps of at
least a quarter of the window.  So a slow actor slows its senders down, its mailbox holds at most one window and one
message per sending rank, and credit that is held back for a lump never stops a sender.

The credit of the link is not used for this: all actors and all replies share it, and an actor that waits for a reply
while its mailbox holds all credit would wait forever.

Stream items.  An item costs its size plus ``ITEM_OVERHEAD``.  The producing end (``Outflow``) may send while it has any
credit, so it overdraws by at most one item, and items of any size pass.  The reading end is a ``ReceiveWindow``.  An
endpoint that yields begins with a full window.  A caller that sends a stream begins with none, and gets a window when
the endpoint first reads, so that calls in a mailbox hold no items.

The module does no I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import msgspec

from asyncpar.errors import ProtocolError, UsageError
from asyncpar.net.transport.lane import Sending
from asyncpar.net.wire.frame import Payload
from asyncpar.net.wire.payload import UnwrittenPayload

WINDOW: Final = 16 << 20
"""Part of the protocol: equal on all ranks."""
OVERHEAD: Final = 1024
MAX_QUEUED_MESSAGES: Final = 65_536
MAX_QUEUED_BYTES: Final = 256 << 20


class OutboundMessage(msgspec.Struct, eq=False):
    """An encoded call or tell, queued or sent."""

    payload: Payload | UnwrittenPayload
    """An ``UnwrittenPayload`` keeps its place in the queue until a thread has written it."""
    is_sent: bool = False
    sending: Sending | None = None
    """The send in progress, until the link has ended it."""

    @property
    def is_written(self) -> bool:
        """Whether the payload can be sent."""
        return type(self.payload) is not UnwrittenPayload

    @property
    def cost(self) -> int:
        return message_cost(self.payload)


def message_cost(payload: Payload | UnwrittenPayload) -> int:
    """Return the cost of a message in its window."""
    return len(payload) + OVERHEAD


class SendWindow:
    """The sender's end of a window: decides which messages for one actor may be sent."""

    def __init__(self) -> None:
        self.is_sending = False
        """Whether the queue is being sent; guards against reentrance."""
        self._queue: OrderedDict[OutboundMessage, None] = OrderedDict()
        self._queued_bytes = 0
        self._travelling = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is outstanding or queued, so that the window may be dropped."""
        return not self._queue and self._travelling == 0

    @property
    def is_full(self) -> bool:
        """Whether the queue is so long that tells must be awaited."""
        return len(self._queue) >= MAX_QUEUED_MESSAGES or self._queued_bytes >= MAX_QUEUED_BYTES

    def put(self, outgoing: OutboundMessage) -> bool:
        """Return True if ``outgoing`` may be sent now; otherwise queue it."""
        if not self._queue and self._travelling < WINDOW and outgoing.is_written:
            self._release(outgoing)
            return True
        self._queue[outgoing] = None
        self._queued_bytes += len(outgoing.payload)
        return False

    def drop(self, outgoing: OutboundMessage) -> bool:
        """Remove ``outgoing`` from the queue; return False if it was sent."""
        if outgoing.is_sent or outgoing not in self._queue:
            return False
        del self._queue[outgoing]
        self._queued_bytes -= len(outgoing.payload)
        return True

    def credit(self, amount: int) -> None:
        """Add credit for messages taken that cost ``amount``.  Raises ``ProtocolError`` for more than was sent."""
        if amount > self._travelling:
            raise ProtocolError(f"actor credit: {self._travelling} are outstanding, the peer returned {amount}")
        self._travelling -= amount

    def next(self) -> OutboundMessage | None:
        """Remove and return the first message of the queue if it is written and may be sent now, else None."""
        if not self._queue or self._travelling >= WINDOW or not next(iter(self._queue)).is_written:
            return None
        outgoing, _ = self._queue.popitem(last=False)
        self._queued_bytes -= len(outgoing.payload)
        self._release(outgoing)
        return outgoing

    def clear(self) -> list[OutboundMessage]:
        """Empty the queue and return its messages, which were never sent: the peer is lost."""
        queued = list(self._queue)
        self._queue.clear()
        self._queued_bytes = self._travelling = 0
        return queued

    def check_room(self, what: str) -> None:
        """Raise ``UsageError`` naming ``what`` if the queue is full."""
        if self.is_full:
            raise UsageError(
                f"{what}: {len(self._queue)} messages ({self._queued_bytes} bytes) wait to be sent to this actor; "
                "await the tells, so that a slow actor slows them down"
            )

    def _release(self, outgoing: OutboundMessage) -> None:
        outgoing.is_sent = True
        self._travelling += outgoing.cost


class ReceiveWindow:
    """The receiver's end of a window: checks that the sender has credit, and returns credit in lumps.

    With ``is_shut`` the sender has no credit before the first ``settle``.
    """

    def __init__(self, size: int = WINDOW, *, is_shut: bool = False) -> None:
        self._size = size
        self._held = self._owed = size if is_shut else 0

    def receive(self, cost: int) -> None:
        """Count a message that arrived.  Raises ``ProtocolError`` if the sender had no credit for it."""
        if self._held >= self._size:
            raise ProtocolError(f"actor messages: the peer overspent its window of {self._size} bytes")
        self._held += cost

    def take(self, cost: int) -> int:
        """Count a message taken from the mailbox; return the credit to send now, 0 for none."""
        self._owed += cost
        return self.settle() if self._owed >= self._size // 4 else 0

    def settle(self) -> int:
        """Return all credit that was not returned yet, 0 for none."""
        owed, self._owed = self._owed, 0
        self._held -= owed
        return owed


STREAM_WINDOW: Final = 1 << 20
"""Part of the protocol: equal on all ranks."""
ITEM_OVERHEAD: Final = 16 << 10
"""With this, 64 small items fill the window."""


def item_cost(payload: memoryview) -> int:
    """Return the cost of an item's message in the window."""
    return len(payload) + ITEM_OVERHEAD


class Outflow:
    """The producing end of a stream's window."""

    def __init__(self, credit: int) -> None:
        self._credit = credit

    @property
    def is_open(self) -> bool:
        return self._credit > 0

    def spend(self, cost: int) -> None:
        """Use credit for an item that is sent."""
        assert self.is_open, "produced without credit"
        self._credit -= cost

    def credit(self, amount: int) -> None:
        """Add credit for items read that cost ``amount``.  Raises ``ProtocolError`` for more than was sent."""
        outstanding = STREAM_WINDOW - self._credit
        if amount > outstanding:
            raise ProtocolError(f"stream credit: {outstanding} are outstanding, the peer returned {amount}")
        self._credit += amount
