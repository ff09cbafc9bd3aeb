"""Channels between two ends in this process, with as little room as those over a wire."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from asyncpar.backends.message_lane import MessageChannel, Receiver

MESSAGE_BYTES = 256 * 1024
WINDOW = 4


class MemoryChannel(MessageChannel):
    """One end.  A message leaves in a later turn of the loop, once the other end is open."""

    message_bytes = MESSAGE_BYTES

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.receiver: Receiver | None = None
        self.outgoing: deque[bytes] = deque()
        self._other: MemoryChannel | None = None
        self.broken: str | None = None
        self._has_ended = False
        self.is_stopped = False

    @staticmethod
    def pair() -> tuple[MemoryChannel, MemoryChannel]:
        one, other = MemoryChannel(), MemoryChannel()
        one._other, other._other = other, one
        return one, other

    @property
    def is_full(self) -> bool:
        return len(self.outgoing) >= WINDOW

    @property
    def is_idle(self) -> bool:
        return not self.outgoing

    def open(self, receiver: Receiver) -> None:
        self.receiver = receiver
        if self.broken is not None:
            receiver.broke(self.broken)
        elif self._other is not None:
            self._other.move_soon()

    def post(self, segments: Sequence[bytes | memoryview]) -> None:
        assert not self.is_full
        message = b"".join(segments)
        assert 1 <= len(message) <= MESSAGE_BYTES
        self.outgoing.append(message)
        self.move_soon()

    def end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self.outgoing.append(b"")
            self.move_soon()

    def stop(self) -> None:
        self.receiver = None
        self.is_stopped = True
        if self._other is not None:
            self._other.move_soon()

    def cut(self, cause: str) -> None:
        """Nothing goes either way any more."""
        for end in (self, self._other):
            assert end is not None
            end.broken = cause
            end.outgoing.clear()
            if end.receiver is not None:
                end.receiver.broke(cause)

    def move_soon(self) -> None:
        self._loop.call_soon(self._move)

    def _move(self) -> None:
        other = self._other
        if not self.outgoing or other is None or (other.receiver is None and not other.is_stopped):
            return
        message = self.outgoing.popleft()
        if other.receiver is not None and message:
            other.receiver.arrived(memoryview(message))
        elif other.receiver is not None:
            other.receiver.ended()
        if self.receiver is not None:
            self.receiver.has_room()
        self.move_soon()
