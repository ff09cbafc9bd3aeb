"""Messages to and from one rank, by MPI's nonblocking point-to-point operations."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from asyncpar.backends.message_lane import MessageChannel, Receiver

MESSAGE_BYTES = 256 * 1024
"""Small enough that copying a message on both sides stays in the cache."""

WINDOW = 8
"""Limit of messages to one rank that MPI has not finished."""

_SMALL_BYTES = 16 * 1024
"""Size up to which fresh memory costs less than keeping some."""


class MessagePool:
    """Reusable memory for messages."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def take(self, length: int) -> memoryview:
        """Return memory for a message of ``length`` bytes."""
        if length <= _SMALL_BYTES:
            return memoryview(bytearray(length))
        whole = self._free.pop() if self._free else memoryview(bytearray(MESSAGE_BYTES))
        return whole[:length]

    def give_back(self, message: memoryview) -> None:
        """Take back ``message``, which neither MPI nor the reader uses any more."""
        whole = message.obj
        if len(message) > _SMALL_BYTES and len(self._free) < 2 * WINDOW and isinstance(whole, bytearray):
            self._free.append(memoryview(whole))


class MpiChannel(MessageChannel):
    """``send(message)`` and ``receive(probed, message)`` start an MPI operation and return its request.

    ``wake`` is called when there is work to progress.
    """

    message_bytes = MESSAGE_BYTES

    def __init__(self, *, send: Callable[[memoryview], Any], pool: MessagePool, wake: Callable[[], None]) -> None:
        self._send = send
        self._pool = pool
        self._wake = wake
        self._receiver: Receiver | None = None
        self._outgoing: deque[tuple[Any, memoryview]] = deque()
        self._incoming: deque[tuple[Any, memoryview]] = deque()
        self._has_ended = False
        self._is_stopped = False
        self._broken: str | None = None
        self.has_peer_ended = False
        """Whether the last message has arrived."""

    @property
    def is_full(self) -> bool:
        return len(self._outgoing) >= WINDOW

    @property
    def is_idle(self) -> bool:
        return not self._outgoing

    @property
    def is_moving(self) -> bool:
        """Whether MPI operations are in progress."""
        return bool(self._outgoing or (self._incoming and (self._receiver is not None or self._is_stopped)))

    @property
    def is_backed_up(self) -> bool:
        """Whether so much waits for ``open`` that nothing more should be received."""
        return len(self._incoming) >= WINDOW and self._receiver is None and not self._is_stopped

    def open(self, receiver: Receiver) -> None:
        self._receiver = receiver
        if self._broken is not None:
            receiver.broke(self._broken)
        else:
            self.progress()

    def post(self, segments: Sequence[bytes | memoryview]) -> None:
        message = self._pool.take(sum(map(len, segments)))
        place = 0
        for segment in segments:
            message[place : place + len(segment)] = segment
            place += len(segment)
        self._begin(message)

    def end(self) -> None:
        if not self._has_ended and self._broken is None:
            self._has_ended = True
            self._begin(memoryview(b""))

    def stop(self) -> None:
        self._receiver = None
        self._is_stopped = True

    def break_off(self, cause: str) -> None:
        """Stop sending and delivering.  Operations that MPI has begun continue, since it keeps their memory."""
        self._broken = self._broken or cause
        receiver = self._receiver
        self.stop()
        if receiver is not None:
            receiver.broke(cause)

    def unfinished(self) -> list[tuple[Any, memoryview]]:
        """Return the operations that MPI has not finished, with the memory that it may still use."""
        return [*self._outgoing, *self._incoming]

    def take(self, request: Any, message: memoryview) -> None:
        """Handle a message that has begun to arrive."""
        self._incoming.append((request, message))

    def progress(self) -> bool:
        """Deliver messages that have arrived and release those that have left; return whether there were any."""
        has_moved = self._release()
        while self._incoming and (self._receiver is not None or self._is_stopped):
            request, message = self._incoming[0]
            if not request.Test():
                break
            self._incoming.popleft()
            self._deliver(message)
            has_moved = True
        return has_moved

    def _deliver(self, message: memoryview) -> None:
        self.has_peer_ended = self.has_peer_ended or not len(message)
        if self._receiver is not None:
            if len(message):
                self._receiver.arrived(message)
            else:
                self._receiver.ended()
        self._pool.give_back(message)

    def _begin(self, message: memoryview) -> None:
        if self._broken is None:
            self._outgoing.append((self._send(message), message))
            self._wake()

    def _release(self) -> bool:
        has_left = False
        while self._outgoing and self._outgoing[0][0].Test():
            self._pool.give_back(self._outgoing.popleft()[1])
            has_left = True
        if has_left and self._receiver is not None:
            self._receiver.has_room()
        return has_left
