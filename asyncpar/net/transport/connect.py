"""Connect to another rank, over TCP or through a Unix socket of the same host.

Unix sockets.  The listening socket has a random name in the abstract namespace, so nothing lies in any file system and
nothing is left of a process that was killed.  The namespace belongs to the network namespace: for ranks in different
containers the name does not exist, and the dial fails at once.  Who comes in is asked of the kernel (the user it runs
as), and then proves itself as on every other lane.
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
"""How often a dialer comes back that is turned away, as happens to some when strangers flood the listener."""

PAUSE_SECONDS = 0.01


def tcp_medium(link_timeout: float = LINK_SECONDS) -> Medium:
    """Return what TCP connections have of their own; a peer from which nothing comes for ``link_timeout`` s is lost."""
    return Medium(
        kind="tcp",
        prepare=lambda sock: tune_tcp(sock, link_timeout),
        watch=lambda sock: Pulse(lambda: read_tcp_info(sock), link_timeout),
    )


TCP = tcp_medium()


class TcpListener(LaneListener):
    """Accepts lanes on a port of its own choosing; ``porter`` sees who may come in."""

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

    Raises ``OSError`` (``TimeoutError`` included) when there is no connection, ``AuthenticationError`` when the
    listener cannot prove itself.
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
    """Does this system name Unix sockets without a file, and say who is at their other ends?  (Linux does.)"""
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
    """Accepts lanes of processes of this host; ``porter`` sees who may come in.

    ``name`` is what they dial, once it was started.
    """

    def __init__(self, porter: Porter) -> None:
        self.name = ""
        self._porter = porter
        self._server: asyncio.Server | None = None

    @property
    def place(self) -> str:
        return self.name

    async def start(self) -> None:
        """Take a random name, and accept."""
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

    Raises as ``dial_tcp`` does; ``ConnectionRefusedError`` at once when there is no such name in this namespace.
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
    """Return a connected socket; waits while the listener's backlog is full, which is all that can take time."""
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
