"""What a message lane needs of whatever carries its messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol


class Receiver(Protocol):
    """What a courier tells.  All calls come on the event loop and never block; none comes before ``Courier.open``."""

    def arrived(self, message: memoryview) -> None:
        """A message is there, in order; its memory is valid during the call."""
        ...

    def ended(self) -> None:
        """The other side has called ``Courier.end``; nothing more comes."""
        ...

    def has_room(self) -> None:
        """A message that was posted has left: there may be room for another."""
        ...

    def broke(self, cause: str) -> None:
        """Nothing can be sent or received any more."""
        ...


class Courier(ABC):
    """Carries messages of bytes to and from one peer, in order, each exactly once."""

    message_bytes: int
    """Most bytes of a message."""

    @property
    @abstractmethod
    def is_full(self) -> bool:
        """Are so many messages under way that another one has to wait?"""

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Has everything that was posted left?"""

    @abstractmethod
    def open(self, receiver: Receiver) -> None:
        """Begin to deliver; what has come before is delivered at once."""

    @abstractmethod
    def post(self, segments: Sequence[bytes | memoryview]) -> None:
        """Copy ``segments`` and send them as one message, of 1 to ``message_bytes``; only while it is not full."""

    @abstractmethod
    def end(self) -> None:
        """Tell the other side, behind all that was posted, that nothing more comes.  Idempotent."""

    @abstractmethod
    def stop(self) -> None:
        """Deliver nothing more; what comes is dropped.  Idempotent."""
