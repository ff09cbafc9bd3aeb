"""Connections to another rank, over TCP or through a Unix socket of the same host.

Unix sockets.  The listening socket has a random name in the abstract namespace, so there is nothing in any file system,
and nothing remains of a process that was killed.  The namespace belongs to the network namespace: for ranks in
different containers the name does not exist, and the dial fails at once.  The kernel reports the user of a connecting
process, which then authenticates itself as on every other lane.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
import sys

from asyncpar.core.concurrency.doorkeeper import turn_backlog
from asyncpar.core.config.transport import LINK_SECONDS
from asyncpar.core.system_errors import os_reason
from asyncpar.errors import UsageError
from asyncpar.net.transport.busy_poll import BusyPoll
from asyncpar.net.transport.handshaking import (
    PEER_SECONDS,
    STRANGER_SECONDS,
    HandshakeProtocol,
    Medium,
    Porter,
    TurnedAwayError,
)
from asyncpar.net.transport.lane_kind import LaneListener
from asyncpar.net.transport.sockets import Pulse, lengthen_queue, read_tcp_info, tune_tcp, tune_unix
from asyncpar.net.transport.stream import StreamLane
from asyncpar.net.wire.handshake import NONCE_BYTES, Handshake, LinkTerms

TRIES = 5
"""Number of tries of a dialer that is turned away, as happens to some when strangers flood the listener."""

PAUSE_SECONDS = 0.01


def tcp_medium(link_timeout: float = LINK_SECONDS) -> Medium:
    """Return the medium of TCP connections; a peer that sends nothing for ``link_timeout`` s is lost."""
    return Medium(
        kind="tcp",
        prepare=lambda sock: tune_tcp(sock, link_timeout),
        watch=lambda sock: Pulse(lambda: read_tcp_info(sock), link_timeout),
    )


TCP = tcp_medium()


class TcpListener(LaneListener):
    """Accepts lanes on a port of its own choosing; ``porter`` decides who is admitted."""

    def __init__(self, porter: Porter, *, bind: str) -> None:
        self.port = 0
        self._porter = porter
        self._bind = bind
        self._server: asyncio.Server | None = None

    @property
    def place(self) -> str:
        return str(self.port)

    async def start(self) -> None:
        """Bind and accept.  Raises ``UsageError`` when the address cannot be bound."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self._porter.greet, self._bind, 0, backlog=turn_backlog())
            lengthen_queue(self._server)
        except OSError as error:
            raise UsageError(f"bind: {self._bind} cannot be bound ({os_reason(error)})") from error
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop accepting, and close connections that are in the handshake.  Idempotent; lanes stay."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._porter.turn_away()


async def dial_tcp(
    host: str, port: int, terms: LinkTerms, *, secret: bytes, busy_poll: BusyPoll, medium: Medium = TCP
) -> StreamLane:
    """Connect to the listener of ``terms.listener`` and return the lane, which is not started yet.

    Raises ``OSError`` (``TimeoutError`` included) if there is no connection, and ``AuthenticationError`` if the
    listener cannot authenticate itself.
    """
    for tried in range(1, TRIES):
        try:
            return await _dial_once(host, port, terms, secret=secret, busy_poll=busy_poll, medium=medium)
        except TurnedAwayError:
            await asyncio.sleep(tried * PAUSE_SECONDS)
    return await _dial_once(host, port, terms, secret=secret, busy_poll=busy_poll, medium=medium)


async def _dial_once(
    host: str, port: int, terms: LinkTerms, *, secret: bytes, busy_poll: BusyPoll, medium: Medium
) -> StreamLane:
    loop = asyncio.get_running_loop()
    handshake = Handshake.dial(terms, secret=secret, nonce=os.urandom(NONCE_BYTES))
    async with asyncio.timeout(STRANGER_SECONDS):
        _, protocol = await loop.create_connection(
            lambda: HandshakeProtocol(handshake, medium, busy_poll, seconds=PEER_SECONDS), host, port
        )
    return await protocol.finished()


_CREDENTIALS = struct.Struct("iII")
_RETRY_SECONDS = 0.01


def has_abstract_sockets() -> bool:
    """Return whether this system names Unix sockets without a file, and identifies their peers.  (Linux does.)"""
    return sys.platform == "linux" and hasattr(socket, "SO_PEERCRED")


def check_same_user(sock: socket.socket) -> None:
    """Raise ``PermissionError`` unless the process at the other end of a Unix socket runs as the same user."""
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.geteuid():
        raise PermissionError(f"the process at the other end runs as user {user}, this one as {os.geteuid()}")


def _prepare(sock: socket.socket) -> None:
    check_same_user(sock)
    tune_unix(sock)


UNIX = Medium(kind="shm", prepare=_prepare, may_damage=False)


class UnixListener(LaneListener):
    """Accepts lanes from processes of this host; ``porter`` decides who is admitted.

    ``name`` is the name to dial, set by the start.
    """

    def __init__(self, porter: Porter) -> None:
        self.name = ""
        self._porter = porter
        self._server: asyncio.Server | None = None

    @property
    def place(self) -> str:
        return self.name

    async def start(self) -> None:
        """Choose a random name, and start to accept."""
        self.name = f"asyncpar-{secrets.token_hex(16)}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(_address(self.name))
            self._server = await asyncio.get_running_loop().create_unix_server(
                self._porter.greet, sock=sock, backlog=turn_backlog()
            )
            lengthen_queue(self._server)
        except BaseException:
            sock.close()
            raise

    async def stop(self) -> None:
        """Stop accepting, and close connections that are in the handshake.  Idempotent; lanes stay."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._porter.turn_away()


async def dial_unix(name: str, terms: LinkTerms, *, secret: bytes, busy_poll: BusyPoll) -> StreamLane:
    """Connect to the listener called ``name`` and return the lane, which is not started yet.

    Raises as ``dial_tcp`` does; ``ConnectionRefusedError`` at once if there is no such name in this namespace.
    """
    loop = asyncio.get_running_loop()
    handshake = Handshake.dial(terms, secret=secret, nonce=os.urandom(NONCE_BYTES))
    sock = await _connect(name)
    try:
        _, protocol = await loop.create_unix_connection(
            lambda: HandshakeProtocol(handshake, UNIX, busy_poll, seconds=PEER_SECONDS), sock=sock
        )
    except BaseException:
        sock.close()
        raise
    return await protocol.finished()


async def _connect(name: str) -> socket.socket:
    """Return a connected socket; wait while the listener's backlog is full, the only thing that can take time."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        async with asyncio.timeout(STRANGER_SECONDS):
            while True:
                try:
                    sock.connect(_address(name))
                except BlockingIOError:
                    await asyncio.sleep(_RETRY_SECONDS)
                else:
                    return sock
    except BaseException:
        sock.close()
        raise


def _address(name: str) -> bytes:
    return b"\0" + name.encode()
