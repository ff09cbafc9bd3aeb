"""How far a stream may run ahead of who reads it.

Theory of operation.  Every item costs its bytes plus an overhead.  The producing end spends credit; it may produce
while it has any, so it overdraws by at most one item, and an item of any size passes in the end.  The reading end
returns what was read, in lumps of at least a quarter of the window.  A lump that is not full yet never holds back the
producer: whoever has read everything owes less than a quarter.

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

    def __init__(self, credit: int, *, window: int = STREAM_WINDOW) -> None:
        self._credit = credit
        self._window = window

    @property
    def is_open(self) -> bool:
        return self._credit > 0

    def spend(self, cost: int) -> None:
        """An item leaves."""
        assert self.is_open, "produced without credit"
        self._credit -= cost

    def credit(self, amount: int) -> None:
        """The reading end took items that cost ``amount``.  Raises ``ProtocolError`` if that many are not out."""
        if amount > self._window - self._credit:
            outstanding = self._window - self._credit
            raise ProtocolError(f"stream credit: {outstanding} are outstanding, the peer returned {amount}")
        self._credit += amount


class Inflow:
    """The reading end: checks that the producer keeps to its credit, and returns credit in lumps."""

    def __init__(self, granted: int, *, window: int = STREAM_WINDOW) -> None:
        self._granted = granted
        self._owed = window - granted
        self._lump = window // 4

    def receive(self, cost: int) -> None:
        """An item arrived.  Raises ``ProtocolError`` if the producer had no credit for it."""
        if self._granted <= 0:
            raise ProtocolError("stream: the peer sent an item without credit")
        self._granted -= cost

    def read(self, cost: int) -> int:
        """An item was read; return the credit to send now, 0 for none."""
        self._owed += cost
        return self.settle() if self._owed >= self._lump else 0

    def settle(self) -> int:
        """Return all credit that is owed, 0 for none."""
        owed, self._owed = self._owed, 0
        self._granted += owed
        return owed
