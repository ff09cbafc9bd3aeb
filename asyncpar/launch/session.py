"""What one end of an agent's stream has sent and received, so that the stream survives its connections.

Theory of operation.  Each end numbers what it sends and keeps it until the other end says that it has received it,
which travels with every message.  After a connection has broken, the ends say how far they have received, and what was
not is sent again; what comes twice is told by its number.  So every message is taken once, in order.  Pure.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar


class Numbered(Protocol):
    """A message with room for its number, and for how far its sender has received."""

    number: int
    received: int


Outgoing = TypeVar("Outgoing", bound=Numbered)


class Session(Generic[Outgoing]):
    """One end, over all connections."""

    def __init__(self) -> None:
        self.received = 0
        self.unacknowledged: deque[Outgoing] = deque()
        self._sent = 0

    def send(self, message: Outgoing) -> Outgoing:
        """Number ``message``, keep it, and return it."""
        self._sent += 1
        message.number = self._sent
        self.unacknowledged.append(message)
        return message

    def take(self, message: Numbered) -> bool:
        """A message came: forget what it acknowledges.  True if it is new."""
        while self.unacknowledged and self.unacknowledged[0].number <= message.received:
            self.unacknowledged.popleft()
        if message.number <= self.received:  # it has none, or comes again
            return False
        self.received = message.number
        return True
