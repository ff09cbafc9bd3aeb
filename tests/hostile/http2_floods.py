"""Streams of HTTP/2 frames by which somebody without the secret tries to take memory or time from a gRPC server."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence

from tests.soak import chosen

PIECE = 16_000
HEADERS, DATA, RESET, SETTINGS, CONTINUATION = 1, 0, 3, 4, 9
END_HEADERS = 4

REST = chosen(0.1, soak=0.002)
"""Seconds after which a flood that was cut off comes again."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0)


def literal(name: bytes, value: bytes) -> bytes:
    """Return a header field that is not indexed, as HPACK has it; both are shorter than 127 bytes."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


CALL = b"".join(
    literal(name, value)
    for name, value in (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/asyncpar.v1.Membership/Join"),
        (b":authority", b"x"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    )
)
MANY = b"".join(literal(b"x-%05d" % number, b"v" * 100) for number in range(140))[:PIECE]


def continuations() -> Iterator[bytes]:
    """A header list without an end."""
    yield frame(HEADERS, 0, 1, MANY)
    while True:
        yield frame(CONTINUATION, 0, 1, MANY)


def calls() -> Iterator[bytes]:
    """Calls without the token, one after another."""
    for stream in range(1, 1 << 30, 2):
        yield frame(HEADERS, END_HEADERS, stream, CALL)


def resets() -> Iterator[bytes]:
    """Calls that are taken back at once."""
    for stream in range(1, 1 << 30, 2):
        yield frame(HEADERS, END_HEADERS, stream, CALL) + frame(RESET, 0, stream, bytes(4))


def headers() -> Iterator[bytes]:
    """Calls with as many headers as fit into four frames."""
    for stream in range(1, 1 << 30, 2):
        more = frame(CONTINUATION, 0, stream, MANY) * 3
        yield frame(HEADERS, 0, stream, CALL) + more + frame(CONTINUATION, END_HEADERS, stream)


def data() -> Iterator[bytes]:
    """One call, and a message without an end, whatever the window of the stream is."""
    yield frame(HEADERS, END_HEADERS, 1, CALL) + frame(DATA, 0, 1, b"\0\x7f\0\0\0")
    while True:
        yield frame(DATA, 0, 1, bytes(PIECE))


FLOODS: dict[str, Callable[[], Iterator[bytes]]] = {
    "endless headers": continuations,
    "calls": calls,
    "resets": resets,
    "large headers": headers,
    "data": data,
}


class Http2Flood:
    """Threads that pour floods of ``kinds`` into ``ports``, over ``each`` connections, and come again when cut off."""

    def __init__(self, ports: Sequence[int], kinds: Sequence[str], *, each: int = 8) -> None:
        self._ends = threading.Event()
        targets = [(port, kind) for port in ports for kind in kinds]
        self._threads = [
            threading.Thread(target=self._run, args=target, daemon=True) for target in targets for _ in range(each)
        ]
        self.cut = dict.fromkeys(targets, 0)
        """How often a connection with a flood of some kind to some port has ended."""
        self.sent = dict.fromkeys(targets, 0)

    def __enter__(self) -> Http2Flood:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _run(self, port: int, kind: str) -> None:
        while not self._ends.is_set():
            with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port)) as sock:
                sock.setblocking(False)
                self._pour(port, kind, sock)
            if not self._ends.is_set():
                self.cut[port, kind] += 1
            self._ends.wait(REST)

    def _pour(self, port: int, kind: str, sock: socket.socket) -> None:
        """Send all that the server takes, until it ends the connection or the flood ends."""
        place = select.poll()
        place.register(sock, select.POLLIN | select.POLLOUT)
        pieces = FLOODS[kind]()
        piece = memoryview(PREFACE)
        while not self._ends.is_set():
            with contextlib.suppress(BlockingIOError):
                for _, events in place.poll(100):
                    if events & ~select.POLLOUT and not sock.recv(1 << 16):
                        return
                    if events & select.POLLOUT:
                        sent = sock.send(piece)
                        self.sent[port, kind] += sent
                        piece = piece[sent:] or memoryview(next(pieces))


def is_grpc(port: int) -> bool:
    """Decide whether the server at ``port`` answers the preface of HTTP/2 with settings, which only gRPC does."""
    with socket.create_connection(("127.0.0.1", port), timeout=30.0) as sock:
        sock.sendall(PREFACE)
        with contextlib.suppress(ConnectionError):
            return sock.recv(9)[3:4] == bytes([SETTINGS])
        return False
