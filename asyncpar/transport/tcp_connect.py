"""Make TCP lanes: dial and listen."""

from __future__ import annotations

import asyncio
import os

from asyncpar.config.transport import LINK_SECONDS
from asyncpar.errors import UsageError
from asyncpar.transport.handshaking import (
    PEER_SECONDS,
    STRANGER_SECONDS,
    HandshakeProtocol,
    Medium,
    Porter,
    TurnedAwayError,
)
from asyncpar.transport.sockets import ACCEPTED_AT_ONCE, Pulse, lengthen_queue, read_tcp_info, tune_tcp
from asyncpar.transport.stream import StreamLane
from asyncpar.transport.vigil import Vigil
from asyncpar.wire.handshake import NONCE_BYTES, Handshake, LinkTerms

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


class TcpListener:
    """Accepts lanes on a port of its own choosing; ``porter`` sees who may come in."""

    def __init__(self, porter: Porter, *, bind: str) -> None:
        self.port = 0
        self._porter = porter
        self._bind = bind
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Bind and accept.  Raises ``UsageError`` when the address cannot be bound."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self._porter.greet, self._bind, 0, backlog=ACCEPTED_AT_ONCE)
            lengthen_queue(self._server)
        except OSError as error:
            raise UsageError(f"bind: {self._bind} cannot be bound ({error.strerror or error})") from error
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Accept nobody any more and turn away who is in the handshake.  Idempotent; lanes live on."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._porter.turn_away()


async def dial_tcp(
    host: str, port: int, terms: LinkTerms, *, secret: bytes, vigil: Vigil, medium: Medium = TCP
) -> StreamLane:
    """Connect to the listener of ``terms.listener`` and return the lane, which is not started yet.

    Raises ``OSError`` (``TimeoutError`` included) when there is no connection, ``AuthenticationError`` when the
    listener cannot prove itself.
    """
    for tried in range(1, TRIES):
        try:
            return await _dial_once(host, port, terms, secret=secret, vigil=vigil, medium=medium)
        except TurnedAwayError:
            await asyncio.sleep(tried * PAUSE_SECONDS)
    return await _dial_once(host, port, terms, secret=secret, vigil=vigil, medium=medium)


async def _dial_once(
    host: str, port: int, terms: LinkTerms, *, secret: bytes, vigil: Vigil, medium: Medium
) -> StreamLane:
    loop = asyncio.get_running_loop()
    handshake = Handshake.dial(terms, secret=secret, nonce=os.urandom(NONCE_BYTES))
    async with asyncio.timeout(STRANGER_SECONDS):
        _, protocol = await loop.create_connection(
            lambda: HandshakeProtocol(handshake, medium, vigil, seconds=PEER_SECONDS), host, port
        )
    return await protocol.finished()
