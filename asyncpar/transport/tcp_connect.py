"""Make TCP lanes: dial, listen, and let nobody in before the handshake is complete."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import cast

from asyncpar.errors import AuthenticationError, PeerLost, UsageError
from asyncpar.transport.sockets import tune
from asyncpar.transport.tcp import TcpLane
from asyncpar.wire.handshake import NONCE_BYTES, Handshake, LinkTerms

CONNECT_SECONDS = 3.0
"""How long the kernel may take to connect."""

STRANGER_SECONDS = 5.0
"""How long a connection may stay open without having shown the secret."""

PEER_SECONDS = 15.0
"""How long a peer may take to finish the handshake: its event loop may be busy with a computation."""

MAX_STRANGERS = 64
"""Most connections that are in their handshake; a further one pushes the oldest out."""


class _HandshakeProtocol(asyncio.BufferedProtocol):
    """Runs a handshake; ends ``lane`` with a lane whose reading is paused, or with an error, and the socket closed."""

    def __init__(self, handshake: Handshake, *, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.handshake = handshake
        self.lane: asyncio.Future[TcpLane] = self._loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._socket: socket.socket | None = None
        self._timer = self._loop.call_later(seconds, self._expire)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # what uvloop passes is none by inheritance
        self._socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        self._socket.setblocking(False)
        tune(self._socket)
        self._advance(0)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self.handshake.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._advance(nbytes)

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail(ConnectionResetError(f"the peer closed the connection during the handshake ({exc or 'no reason'})"))

    def fail(self, error: Exception) -> None:
        """End without a lane, unless there is one; the peer learns nothing."""
        self._timer.cancel()
        if self.lane.done():
            return
        self.lane.set_exception(error)
        self.lane.exception()
        if self._socket is not None:
            self._socket.close()
        if self._transport is not None:
            self._transport.abort()

    def _advance(self, count: int) -> None:
        assert self._transport is not None
        assert self._socket is not None
        was_trusted = self.handshake.is_trusted
        try:
            self._say(self.handshake.advance(count) if count else self.handshake.opening)
        except (AuthenticationError, OSError) as error:
            self.fail(error)
            return
        if self.handshake.is_complete:
            self._timer.cancel()
            self._transport.pause_reading()
            self.lane.set_result(TcpLane(self._transport, self._socket))
        elif self.handshake.is_trusted and not was_trusted:
            self._timer.cancel()
            self._timer = self._loop.call_later(PEER_SECONDS, self._expire)

    def _say(self, message: bytes) -> None:
        """Send on our own descriptor, as the lane does, whose first frame might overtake what a transport buffers."""
        assert self._socket is not None
        if message and self._socket.send(message) != len(message):
            raise ConnectionAbortedError("a fresh connection did not take a whole handshake message")

    def discard(self) -> None:
        """Close whatever has become of the connection."""
        self.fail(ConnectionAbortedError("the connection is not needed any more"))
        if self.lane.exception() is None:
            self.lane.result().abort(PeerLost("the connection is not needed any more", cause="cancelled"))

    def _expire(self) -> None:
        self.fail(TimeoutError("the peer did not finish the handshake in time"))


class TcpListener:
    """Accepts lanes on a port of its own choosing.

    ``find_terms`` is asked what was agreed under a token; ``on_lane`` gets each lane whose peer proved itself.
    """

    def __init__(
        self,
        *,
        bind: str,
        secret: bytes,
        find_terms: Callable[[bytes], LinkTerms | None],
        on_lane: Callable[[LinkTerms, TcpLane], None],
        on_refused: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        self.port = 0
        self._bind = bind
        self._secret = secret
        self._find_terms = find_terms
        self._on_lane = on_lane
        self._on_refused = on_refused
        self._strangers: dict[_HandshakeProtocol, None] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Bind and accept.  Raises ``UsageError`` when the address cannot be bound."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self._greet, self._bind, 0)
        except OSError as error:
            raise UsageError(f"bind: {self._bind} cannot be bound ({error.strerror or error})") from error
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Accept nobody any more and turn away who is in the handshake.  Idempotent; lanes live on."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for stranger in list(self._strangers):
            stranger.fail(ConnectionResetError("this node stopped accepting links"))

    @property
    def strangers(self) -> int:
        """Connections that are in their handshake."""
        return len(self._strangers)

    def _greet(self) -> _HandshakeProtocol:
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.fail(TimeoutError("too many connections are in their handshake"))
        handshake = Handshake.listen(self._find_terms, secret=self._secret, nonce=os.urandom(NONCE_BYTES))
        stranger = _HandshakeProtocol(handshake, seconds=STRANGER_SECONDS)
        self._strangers[stranger] = None
        stranger.lane.add_done_callback(lambda lane: self._leave(stranger, lane))
        return stranger

    def _leave(self, stranger: _HandshakeProtocol, lane: asyncio.Future[TcpLane]) -> None:
        self._strangers.pop(stranger, None)
        error = lane.exception()
        if error is None:
            self._on_lane(stranger.handshake.terms, lane.result())
        elif isinstance(error, Exception):
            self._on_refused(error)


async def dial_tcp(host: str, port: int, terms: LinkTerms, *, secret: bytes) -> TcpLane:
    """Connect to the listener of ``terms.listener`` and return the lane, which is not started yet.

    Raises ``OSError`` (``TimeoutError`` included) when there is no connection, ``AuthenticationError`` when the
    listener cannot prove itself.
    """
    loop = asyncio.get_running_loop()
    handshake = Handshake.dial(terms, secret=secret, nonce=os.urandom(NONCE_BYTES))
    async with asyncio.timeout(STRANGER_SECONDS):
        _, protocol = await loop.create_connection(
            lambda: _HandshakeProtocol(handshake, seconds=PEER_SECONDS), host, port
        )
    try:
        return await asyncio.shield(protocol.lane)
    except asyncio.CancelledError:
        protocol.discard()
        raise
