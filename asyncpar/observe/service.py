"""The rank's end of its connection to the agent: a thread of its own answers requests.

Theory of operation.  The agent passes each rank one end of a socket pair (``ASYNCPAR_OBSERVE_FD``).  A daemon thread
reads requests, one at a time, and writes answers: it never needs the event loop, and takes part in no operation, so a
hang does not affect it.  Only a process that is stopped, or whose interpreter lock is held, does not answer; the agent
detects that by other means.  Without requests, the thread sleeps in the kernel.  The end of the process waits for the
answer in progress, and lets none begin: the interpreter ends a thread that requests its lock while it finalizes, and
where that thread is in C++ code, such as numpy's, the whole process dies of it (SIGABRT).

Frames are a length of four bytes and msgpack: ``ObserverRequest`` one way, ``ObserverReply`` the other.  The possible
requests are registered by ``provide``: a name, and a function that is called in the thread.
"""

from __future__ import annotations

import atexit
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

import msgspec

from asyncpar.core.observe.reporting import text_of

OBSERVE_FD: Final = "ASYNCPAR_OBSERVE_FD"
"""The variable with the number of the inherited socket for requests of the agent."""

LENGTH: Final = struct.Struct("!I")
MOST_BYTES: Final = 64 << 20
_SEND_SECONDS: Final = 5.0
_ANSWER_SECONDS: Final = 5.0


class ObserverRequest(msgspec.Struct, frozen=True):
    """Request for the content provided as ``kind``; the reply has the same ``number``."""

    number: int
    kind: str


class ObserverReply(msgspec.Struct, frozen=True):
    """The answer; ``error`` explains why there is no ``content``."""

    number: int
    content: bytes = b""
    error: str = ""


Provide = Callable[[], bytes]
_providers: dict[str, Provide] = {}


def provide(kind: str, make: Provide) -> Callable[[], None]:
    """Answer requests for ``kind`` with the result of ``make``, called in the thread; return a callback that ends this.

    The latest provider answers.
    """
    before = _providers.get(kind)
    _providers[kind] = make

    def withdraw() -> None:
        if _providers.get(kind) is make:
            if before is None:
                del _providers[kind]
            else:
                _providers[kind] = before

    return withdraw


class RankService:
    """Answers requests over one socket until it is closed."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._thread = threading.Thread(target=self.run, name="asyncpar observer", daemon=True)
        self._answering = threading.Lock()
        self.answered = 0

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Wait for the answer in progress, at most five seconds, and let none begin.  Nothing to do after a fork."""
        if self._thread.is_alive():
            self._answering.acquire(timeout=_ANSWER_SECONDS)

    def run(self) -> None:
        """Answer until the other end is closed, or does not accept an answer."""
        with suppress(OSError, EOFError, msgspec.DecodeError), self._connection:
            self._connection.settimeout(None)
            while True:
                request = msgspec.msgpack.decode(read_frame(self._connection), type=ObserverRequest)
                with self._answering:
                    reply = self._answer(request)
                self._connection.settimeout(_SEND_SECONDS)
                self._connection.sendall(frame(reply))
                self._connection.settimeout(None)
                self.answered += 1

    def _answer(self, request: ObserverRequest) -> ObserverReply:
        make = _providers.get(request.kind)
        if make is None:
            return ObserverReply(request.number, error=f"this rank has no {request.kind} to report")
        try:
            return ObserverReply(request.number, make())
        except Exception as error:  # noqa: BLE001  # state in motion, read from a thread: the next request succeeds
            return ObserverReply(request.number, error=f"{type(error).__name__}: {text_of(error)}")


_service: RankService | None = None


def open_service(environment: Mapping[str, str]) -> None:
    """Answer the agent that has started this process, if it has passed a socket; once in a process.

    ``rank_view.provide_process`` registers the answers.
    """
    global _service  # noqa: PLW0603  # the descriptor is the process's
    text = environment.get(OBSERVE_FD, "")
    if _service is not None or not (text.isascii() and text.isdecimal()):
        return
    try:
        os.set_inheritable(int(text), False)
        connection = socket.socket(fileno=int(text))
    except OSError:  # a program started by a rank inherits its variables, but not its descriptors
        return
    _service = RankService(connection)
    _service.start()


@atexit.register
def _stop_service() -> None:
    if _service is not None:
        _service.stop()


def is_open() -> bool:
    """Return whether an agent observes this process."""
    return _service is not None


def frame(value: msgspec.Struct) -> bytes:
    """Encode ``value`` as a frame."""
    content = msgspec.msgpack.encode(value)
    return LENGTH.pack(len(content)) + content


def read_frame(connection: socket.socket) -> bytes:
    """Return the content of the next frame.  Raises ``EOFError`` at the end, or for one that is too long."""
    (length,) = LENGTH.unpack(_read(connection, LENGTH.size))
    if length > MOST_BYTES:
        raise EOFError(f"a frame of {length} bytes")
    return _read(connection, length)


def _read(connection: socket.socket, count: int) -> bytes:
    content = bytearray()
    while len(content) < count:
        chunk = connection.recv(min(1 << 20, count - len(content)))
        if not chunk:
            raise EOFError
        content += chunk
    return bytes(content)
