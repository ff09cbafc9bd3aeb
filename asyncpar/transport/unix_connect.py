"""Make Unix-socket lanes, between ranks of one host: dial and listen.

The listening socket has a random name in the abstract namespace, so nothing lies in any file system and nothing is left
of a process that was killed.  The namespace belongs to the network namespace: for ranks in different containers the
name does not exist, and the dial fails at once.  Who comes in is asked of the kernel (the user it runs as), and then
proves itself as on every other lane.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
import sys

from asyncpar.transport.handshaking import PEER_SECONDS, STRANGER_SECONDS, HandshakeProtocol, Medium, Porter
from asyncpar.transport.sockets import ACCEPTED_AT_ONCE, lengthen_queue, tune_unix
from asyncpar.transport.stream import StreamLane
from asyncpar.transport.vigil import Vigil
from asyncpar.wire.handshake import NONCE_BYTES, Handshake, LinkTerms

_CREDENTIALS = struct.Struct("iII")
_RETRY_SECONDS = 0.01


def has_abstract_sockets() -> bool:
    """Does this system name Unix sockets without a file?  (Linux does.)"""
    return sys.platform == "linux"


def check_same_user(sock: socket.socket) -> None:
    """Raise ``PermissionError`` unless the process at the other end of a Unix socket runs as the same user."""
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.geteuid():
        raise PermissionError(f"the process at the other end runs as user {user}, this one as {os.geteuid()}")


def _prepare(sock: socket.socket) -> None:
    check_same_user(sock)
    tune_unix(sock)


UNIX = Medium(kind="shm", prepare=_prepare, may_damage=False)


class UnixListener:
    """Accepts lanes of processes of this host; ``porter`` sees who may come in.

    ``name`` is what they dial, once it was started.
    """

    def __init__(self, porter: Porter) -> None:
        self.name = ""
        self._porter = porter
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Take a name that nobody can guess, and accept."""
        self.name = f"asyncpar-{secrets.token_hex(16)}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(_address(self.name))
            self._server = await asyncio.get_running_loop().create_unix_server(
                self._porter.greet, sock=sock, backlog=ACCEPTED_AT_ONCE
            )
            lengthen_queue(self._server)
        except BaseException:
            sock.close()
            raise

    async def stop(self) -> None:
        """Accept nobody any more and turn away who is in the handshake.  Idempotent; lanes live on."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._porter.turn_away()


async def dial_unix(name: str, terms: LinkTerms, *, secret: bytes, vigil: Vigil) -> StreamLane:
    """Connect to the listener called ``name`` and return the lane, which is not started yet.

    Raises as ``dial_tcp`` does; ``ConnectionRefusedError`` at once when there is no such name in this namespace.
    """
    loop = asyncio.get_running_loop()
    handshake = Handshake.dial(terms, secret=secret, nonce=os.urandom(NONCE_BYTES))
    sock = await _connect(name)
    try:
        _, protocol = await loop.create_unix_connection(
            lambda: HandshakeProtocol(handshake, UNIX, vigil, seconds=PEER_SECONDS), sock=sock
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
