"""Messages to and from one rank over a process group of torch, whose operations block: a thread for each direction.

A message is sent as an opening of fixed length, since a receiver must know how much comes, and the rest that does not
fit into that.  The opening is the length of the whole as a little-endian u64, then its first bytes; length 0 is the
end.  Gloo sends only what the other end has requested, so several openings are requested in advance.
"""

from __future__ import annotations

import asyncio
import queue
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from asyncpar.backends.message_lane import MessageChannel, Receiver

WINDOW = 8
"""Limit of messages of one direction between the loop and the thread."""

MESSAGE_BYTES = 1024 * 1024
OPENING_BYTES = 4096
_OPENINGS = 4
_LENGTH = struct.Struct("<Q")
_FIRST_BYTES = OPENING_BYTES - _LENGTH.size


class GlooWork(Protocol):
    """An operation of torch."""

    def wait(self) -> object: ...


class Pipe(Protocol):
    """Moves bytes of lengths known at both ends to and from one peer, openings and rests separately, each in order.

    Waiting blocks, and raises ``RuntimeError`` if the operation has failed.
    """

    def send(self, piece: memoryview, *, is_rest: bool) -> GlooWork: ...
    def receive(self, memory: memoryview, *, is_rest: bool) -> GlooWork: ...


class GlooChannel(MessageChannel):
    """The channel over ``pipe``, whose operations block; ``name`` is that of its threads."""

    message_bytes = MESSAGE_BYTES

    def __init__(self, pipe: Pipe, *, name: str) -> None:
        self._pipe = pipe
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._receiver: Receiver | None = None
        self._outgoing: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
        self._incoming: deque[bytearray] = deque()
        self._places = threading.Semaphore(WINDOW)
        self._posted = 0
        self._threads: list[threading.Thread] = []
        self._has_sender = False
        self._has_ended = False
        self._is_stopped = False
        self._broken: str | None = None
        self._meet: Callable[[], None] | None = None
        self._leave: Callable[[], None] | None = None
        self.has_peer_ended = False
        """Whether the last message has arrived."""

    def listen(self, *, meet: Callable[[], None], leave: Callable[[], None]) -> None:
        """Start receiving.

        ``meet`` is called at the first message, if the channel is not open by then, or ``leave`` if it is the end.
        """
        self._meet, self._leave = meet, leave
        self._run(self._receive_all, "receives")

    # -- Channel -----------------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        return self._posted >= WINDOW

    @property
    def is_idle(self) -> bool:
        return self._posted == 0

    @property
    def is_through(self) -> bool:
        """Whether all posted messages have left and the last message has arrived."""
        return self._broken is not None or (self.is_idle and self.has_peer_ended)

    def open(self, receiver: Receiver) -> None:
        self._meet = self._leave = None
        self._receiver = receiver
        self._deliver()
        if self._broken is not None and self._receiver is not None:
            receiver.broke(self._broken)

    def post(self, segments: Sequence[bytes | memoryview]) -> None:
        length = sum(map(len, segments))
        message = bytearray(max(OPENING_BYTES, _LENGTH.size + length))
        _LENGTH.pack_into(message, 0, length)
        place = _LENGTH.size
        for segment in segments:
            message[place : place + len(segment)] = segment
            place += len(segment)
        self._begin(message)

    def end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._begin(bytearray(OPENING_BYTES))

    def stop(self) -> None:
        self._receiver = None
        self._is_stopped = True
        self._deliver()

    def join(self, timeout: float) -> None:
        """Wait for the threads, which end with the last message or if the connection breaks.  Blocks."""
        for thread in self._threads:
            thread.join(timeout)

    # -- on the loop -------------------------------------------------------------------------------------------------

    def _run(self, work: Callable[[], None], what: str) -> None:
        thread = threading.Thread(target=work, name=f"{self._name} {what}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _begin(self, message: bytearray) -> None:
        if self._broken is not None:
            return
        if not self._has_sender:
            self._has_sender = True
            self._run(self._send_all, "sends")
        self._posted += 1
        self._outgoing.put(message)

    def _has_left(self) -> None:
        self._posted -= 1
        if self._receiver is not None:
            self._receiver.has_room()

    def _has_come(self, message: bytearray) -> None:
        self._incoming.append(message)
        greet = self._meet if message else self._leave
        if greet is not None:
            self._meet = self._leave = None
            greet()
        self._deliver()

    def _deliver(self) -> None:
        while self._incoming and (self._receiver is not None or self._is_stopped):
            message = self._incoming.popleft()
            self._places.release()
            if not message:
                self.has_peer_ended = True
            if self._receiver is None:
                continue
            if message:
                self._receiver.arrived(memoryview(message))
            else:
                self._receiver.ended()

    def break_off(self, cause: str) -> None:
        """Close the channel for both directions."""
        if self._broken is None and not self.has_peer_ended:
            self._broken = cause
            self._outgoing.put(bytearray(OPENING_BYTES))  # for the thread, so that it ends
            if self._receiver is not None:
                self._receiver.broke(cause)

    # -- in threads --------------------------------------------------------------------------------------------------

    def _send_all(self) -> None:
        is_last = False
        while not is_last:
            message = memoryview(self._outgoing.get())
            is_last = not _LENGTH.unpack_from(message)[0]
            try:
                works = [self._pipe.send(message[:OPENING_BYTES], is_rest=False)]
                if len(message) > OPENING_BYTES:
                    works.append(self._pipe.send(message[OPENING_BYTES:], is_rest=True))
                for work in works:
                    work.wait()
            except RuntimeError as error:
                self._notify(self.break_off, _first_line(error))
                return
            if not self._notify(self._has_left):
                return

    def _receive_all(self) -> None:
        openings: deque[tuple[memoryview, GlooWork]] = deque()
        length = -1
        while length:
            self._places.acquire()
            try:
                while len(openings) < _OPENINGS:
                    memory = memoryview(bytearray(OPENING_BYTES))
                    openings.append((memory, self._pipe.receive(memory, is_rest=False)))
                opening, work = openings.popleft()
                work.wait()
                message = self._receive_rest(opening)
            except RuntimeError as error:
                self._notify(self.break_off, _first_line(error))
                return
            length = len(message)
            if not self._notify(self._has_come, message):
                return

    def _receive_rest(self, opening: memoryview) -> bytearray:
        """Return the whole of the message with this opening."""
        length: int = _LENGTH.unpack_from(opening)[0]
        if length > MESSAGE_BYTES:
            raise RuntimeError(f"a message of {length} bytes came")
        message = bytearray(length)
        message[:_FIRST_BYTES] = opening[_LENGTH.size :][:length]
        if length > _FIRST_BYTES:
            self._pipe.receive(memoryview(message)[_FIRST_BYTES:], is_rest=True).wait()
        return message

    def _notify(self, what: Callable[..., None], *args: Any) -> bool:
        """Call ``what`` on the loop; return False if that is closed."""
        try:
            self._loop.call_soon_threadsafe(what, *args)
        except RuntimeError:
            return False
        return True


def _first_line(error: RuntimeError) -> str:
    """Return the first line of Gloo's error; the rest is its source line and advice."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    return text.rpartition("] ")[2].partition(". This is")[0] if text.startswith("[") else text
