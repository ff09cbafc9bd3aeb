"""Turn fresh connections into lanes: nobody gets in before the handshake is complete."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from asyncpar.errors import AuthenticationError, PeerLost
from asyncpar.transport.sockets import Pulse
from asyncpar.transport.stream import StreamLane
from asyncpar.transport.vigil import Vigil
from asyncpar.wire.handshake import NONCE_BYTES, Handshake, LinkTerms

STRANGER_SECONDS = 5.0
"""How long a connection may stay open without having shown the secret."""

PEER_SECONDS = 15.0
"""How long a peer may take to finish the handshake: its event loop may be busy with a computation."""

MAX_STRANGERS = 64
"""Most connections of a listener that are in their handshake; a further one pushes the oldest out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Medium:
    """What connections of one kind of lane have of their own.

    ``prepare`` sets a fresh socket up, and raises ``OSError`` if the peer at its other end is none of ours; ``watch``
    returns what tells that the peer is dead where the socket does not.
    """

    kind: str
    prepare: Callable[[socket.socket], None]
    watch: Callable[[socket.socket], Pulse] | None = None


class HandshakeProtocol(asyncio.BufferedProtocol):
    """Runs a handshake; ends ``lane`` with a lane whose reading is paused, or with an error, and the socket closed."""

    def __init__(self, handshake: Handshake, medium: Medium, vigil: Vigil, *, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.handshake = handshake
        self.lane: asyncio.Future[StreamLane] = self._loop.create_future()
        self._medium = medium
        self._vigil = vigil
        self._transport: asyncio.Transport | None = None
        self._socket: socket.socket | None = None
        self._timer = self._loop.call_later(seconds, self._expire)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # what uvloop passes is none by inheritance
        self._socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        self._socket.setblocking(False)
        try:
            self._medium.prepare(self._socket)
        except OSError as error:
            self.fail(error)
        else:
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

    def discard(self) -> None:
        """Close whatever has become of the connection."""
        self.fail(ConnectionAbortedError("the connection is not needed any more"))
        if self.lane.exception() is None:
            self.lane.result().abort(PeerLost("the connection is not needed any more", cause="cancelled"))

    async def finished(self) -> StreamLane:
        """Wait for the lane; if that is cancelled, nothing is left of the connection."""
        try:
            return await asyncio.shield(self.lane)
        except asyncio.CancelledError:
            self.discard()
            raise

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
            self.lane.set_result(self._make_lane(self._transport, self._socket))
        elif self.handshake.is_trusted and not was_trusted:
            self._timer.cancel()
            self._timer = self._loop.call_later(PEER_SECONDS, self._expire)

    def _make_lane(self, transport: asyncio.Transport, duplicate: socket.socket) -> StreamLane:
        watch = self._medium.watch
        pulse = None if watch is None else watch(duplicate)
        return StreamLane(transport, duplicate, kind=self._medium.kind, vigil=self._vigil, pulse=pulse)

    def _say(self, message: bytes) -> None:
        """Send on our own descriptor, as the lane does, whose first frame might overtake what a transport buffers."""
        assert self._socket is not None
        if message and self._socket.send(message) != len(message):
            raise ConnectionAbortedError("a fresh connection did not take a whole handshake message")

    def _expire(self) -> None:
        self.fail(TimeoutError("the peer did not finish the handshake in time"))


class Porter:
    """Stands behind a listening socket: greets connections, and lets those in that prove themselves.

    ``find_terms`` is asked what was agreed under a token; ``on_lane`` gets each lane whose peer proved itself, which
    shares ``vigil``.
    """

    def __init__(
        self,
        medium: Medium,
        *,
        secret: bytes,
        vigil: Vigil,
        find_terms: Callable[[bytes], LinkTerms | None],
        on_lane: Callable[[LinkTerms, StreamLane], None],
        on_refused: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        self._medium = medium
        self._secret = secret
        self._vigil = vigil
        self._find_terms = find_terms
        self._on_lane = on_lane
        self._on_refused = on_refused
        self._strangers: dict[HandshakeProtocol, None] = {}

    @property
    def strangers(self) -> int:
        """Connections that are in their handshake."""
        return len(self._strangers)

    def greet(self) -> HandshakeProtocol:
        """Return the protocol for a connection that was accepted."""
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.fail(TimeoutError("too many connections are in their handshake"))
        handshake = Handshake.listen(self._find_terms, secret=self._secret, nonce=os.urandom(NONCE_BYTES))
        stranger = HandshakeProtocol(handshake, self._medium, self._vigil, seconds=STRANGER_SECONDS)
        self._strangers[stranger] = None
        stranger.lane.add_done_callback(lambda lane: self._leave(stranger, lane))
        return stranger

    def turn_away(self) -> None:
        """End every handshake that is not complete; lanes live on."""
        for stranger in list(self._strangers):
            stranger.fail(ConnectionResetError("this node stopped accepting links"))

    def _leave(self, stranger: HandshakeProtocol, lane: asyncio.Future[StreamLane]) -> None:
        self._strangers.pop(stranger, None)
        error = lane.exception()
        if error is None:
            self._on_lane(stranger.handshake.terms, lane.result())
        elif isinstance(error, Exception):
            self._on_refused(error)
