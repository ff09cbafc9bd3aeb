"""How far a stream may run ahead of who reads it.

Theory of operation.  Every item costs its bytes plus an overhead.  The producing end spends credit; it may produce
while it has any, so it overdraws by at most one item, and an item of any size passes in the end.  The reading end is a
``window.ReceiveWindow``: it returns what was read, in lumps of at least a quarter of the window.  A lump that is not
full yet never holds back the producer: whoever has read everything owes less than a quarter.

An endpoint that yields may begin with a full window.  A caller that feeds begins with nothing and is granted a window
when the endpoint first asks for an item, so that calls which wait in a mailbox hold no items.

The module decides only.
"""

from __future__ import annotations

from typing import Final

from asyncpar.errors import ProtocolError

STREAM_WINDOW: Final = 1 << 20
"""Part of the protocol: equal on all ranks."""
ITEM_OVERHEAD: Final = 16 << 10
"""With this, 64 small items fill the window."""


def item_cost(payload: memoryview) -> int:
    """Return what the message that carries an item takes out of the window."""
    return len(payload) + ITEM_OVERHEAD


class Outflow:
    """The producing end: says whether one more item may be produced."""

    def __init__(self, credit: int) -> None:
        self._credit = credit

    @property
    def is_open(self) -> bool:
        return self._credit > 0

    def spend(self, cost: int) -> None:
        """An item leaves."""
        assert self.is_open, "produced without credit"
        self._credit -= cost

    def credit(self, amount: int) -> None:
        """The reading end took items that cost ``amount``.  Raises ``ProtocolError`` if that many are not out."""
        outstanding = STREAM_WINDOW - self._credit
        if amount > outstanding:
            raise ProtocolError(f"stream credit: {outstanding} are outstanding, the peer returned {amount}")
        self._credit += amount
