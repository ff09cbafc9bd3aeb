"""Handshakes that turn new connections into lanes: no peer is admitted before its handshake is complete.

When too many connections wait (``PendingConnections``), one of them is closed at random.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import socket
from collections.abc import Callable
from typing import cast

import msgspec

from asyncpar.core.concurrency.doorkeeper import PendingConnections
from asyncpar.core.descriptors import descriptor_limit, is_reserved, places
from asyncpar.errors import AuthenticationError, PeerLost
from asyncpar.net.transport.busy_poll import BusyPoll
from asyncpar.net.transport.protection import Protection
from asyncpar.net.transport.sockets import Pulse
from asyncpar.net.transport.stream import StreamLane
from asyncpar.net.wire.handshake import NONCE_BYTES, Handshake, LinkTerms

STRANGER_SECONDS = 5.0
"""Seconds for which a connection may stay open without having shown the secret."""

PEER_SECONDS = 15.0
"""Seconds for which a peer may take to finish the handshake: its event loop may be busy with a computation."""

MAX_STRANGERS = 64
"""Most connections of a listener that have not shown the secret; a further one pushes one of them out.

As many that have shown it may be in their handshake; strangers do not push these out.
"""

MAX_PER_ADDRESS = 48
"""Most of them from one address, so that a flood from there leaves places for others."""


class TurnedAwayError(ConnectionResetError):
    """The listener closed the connection silently: it does not know us, or had to choose among too many."""


class Medium(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a handshake that differ between kinds of lanes.

    ``prepare`` configures a new socket, and raises ``OSError`` if its peer is not one of ours; ``watch`` returns the
    detector of a dead peer where the socket does not detect it.  ``may_damage``: bytes may change in transit.
    """

    kind: str
    prepare: Callable[[socket.socket], None]
    watch: Callable[[socket.socket], Pulse] | None = None
    may_damage: bool = True


def _ignore(_: HandshakeProtocol) -> None: ...


class HandshakeProtocol(asyncio.BufferedProtocol):
    """Runs a handshake; ends ``lane`` with a lane whose reading is paused, or with an error and the socket closed.

    ``on_stranger`` is called when the connection is made, unless the peer shows the secret at once; ``on_trusted`` when
    it shows it.
    """

    def __init__(
        self,
        handshake: Handshake,
        medium: Medium,
        busy_poll: BusyPoll,
        *,
        seconds: float,
        on_stranger: Callable[[HandshakeProtocol], None] = _ignore,
        on_trusted: Callable[[HandshakeProtocol], None] = _ignore,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.handshake = handshake
        self.lane: asyncio.Future[StreamLane] = self._loop.create_future()
        self._medium = medium
        self._busy_poll = busy_poll
        self._on_stranger = on_stranger
        self._on_trusted = on_trusted
        self._transport: asyncio.Transport | None = None
        self._socket: socket.socket | None = None
        self._timer = self._loop.call_later(seconds, self._expire)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass
        try:
            self._socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
            self._socket.setblocking(False)
            self._medium.prepare(self._socket)
            self._advance(0 if self.handshake.opening else self._read_now())
        except OSError as error:  # too many open files, too
            self.fail(error)
        if not self.lane.done() and not self.handshake.is_trusted:
            self._on_stranger(self)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self.handshake.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._advance(nbytes)

    def connection_lost(self, exc: Exception | None) -> None:
        why = f"the peer closed the connection during the handshake ({exc or 'no reason'})"
        self.fail(ConnectionResetError(why) if self.handshake.is_trusted else TurnedAwayError(why))

    @property
    def address(self) -> str:
        """The address of the peer; "" for a Unix socket, or without a connection."""
        peer = None if self._transport is None else self._transport.get_extra_info("peername")
        return peer[0] if isinstance(peer, tuple) and peer else ""

    @property
    def takes_reserve(self) -> bool:
        """Whether this connection takes one of the descriptors that the process reserves for itself."""
        return self._socket is not None and is_reserved(self._socket.fileno())

    def fail(self, error: Exception) -> None:
        """End without a lane, unless there is one; the peer does not learn why."""
        self._timer.cancel()
        if self.lane.done():
            return
        self.lane.set_exception(error)
        self.lane.exception()
        if self._socket is not None:
            self._socket.close()
        if self._transport is not None:
            self._transport.abort()

    def push_out(self) -> None:
        """Make room for others, unless the peer has already shown the secret but was not read yet."""
        was_trusted = self.handshake.is_trusted
        if not was_trusted and not self.lane.done():
            try:
                self._advance(self._read_now())
            except OSError as error:
                self.fail(error)
        if was_trusted or not self.handshake.is_trusted:
            self.fail(TimeoutError("too many connections are in their handshake"))

    def discard(self) -> None:
        """Close the connection in any state."""
        self.fail(ConnectionAbortedError("the connection is not needed any more"))
        if self.lane.exception() is None:
            self.lane.result().abort(PeerLost("the connection is not needed any more", cause="cancelled"))

    async def finished(self) -> StreamLane:
        """Wait for the lane; if this is cancelled, discard the connection."""
        try:
            return await asyncio.shield(self.lane)
        except asyncio.CancelledError:
            self.discard()
            raise

    def _read_now(self) -> int:
        """Read what the peer has already sent: one that authenticates at once never counts as a stranger."""
        assert self._socket is not None
        try:
            return self._socket.recv_into(self.handshake.buffer())
        except BlockingIOError:
            return 0

    def _advance(self, count: int) -> None:
        assert self._transport is not None
        assert self._socket is not None
        was_trusted = self.handshake.is_trusted
        try:
            self._send(self.handshake.advance(count) if count else self.handshake.opening)
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
            self._on_trusted(self)

    def _make_lane(self, transport: asyncio.Transport, duplicate: socket.socket) -> StreamLane:
        watch = self._medium.watch
        pulse = None if watch is None else watch(duplicate)
        protection = Protection(self.handshake, may_damage=self._medium.may_damage)
        return StreamLane(
            transport, duplicate, kind=self._medium.kind, busy_poll=self._busy_poll, protection=protection, pulse=pulse
        )

    def _send(self, message: bytes) -> None:
        """Send on our own descriptor, as the lane does: its first frame might overtake data buffered by a transport."""
        assert self._socket is not None
        if message and self._socket.send(message) != len(message):
            raise ConnectionAbortedError("a fresh connection did not take a whole handshake message")

    def _expire(self) -> None:
        self.fail(TimeoutError("the peer did not finish the handshake in time"))


class Porter:
    """Guards a listening socket: receives connections, and admits those that authenticate themselves.

    ``find_terms`` returns the terms agreed on under a token; ``on_lane`` receives each lane whose peer is
    authenticated, which shares ``busy_poll``.
    """

    def __init__(
        self,
        medium: Medium,
        *,
        secret: bytes,
        busy_poll: BusyPoll,
        find_terms: Callable[[bytes], LinkTerms | None],
        on_lane: Callable[[LinkTerms, StreamLane], None],
        on_refused: Callable[[Exception], None] = lambda _: None,
        dice: random.Random | None = None,
    ) -> None:
        self._medium = medium
        self._secret = secret
        self._busy_poll = busy_poll
        self._find_terms = find_terms
        self._on_lane = on_lane
        self._on_refused = on_refused
        dice = dice or random.SystemRandom()
        self._strangers = PendingConnections[HandshakeProtocol](dice)
        self._guests = PendingConnections[HandshakeProtocol](dice)
        self._is_closed = False

    @property
    def strangers(self) -> int:
        """Number of connections that have not shown the secret."""
        return len(self._strangers)

    @property
    def guests(self) -> int:
        """Number of connections that have shown the secret, but not answered the challenge yet."""
        return len(self._guests)

    def greet(self) -> HandshakeProtocol:
        """Return the protocol for an accepted connection."""
        stranger = HandshakeProtocol(
            Handshake.listen(self._find_terms, secret=self._secret, nonce=os.urandom(NONCE_BYTES)),
            self._medium,
            self._busy_poll,
            seconds=STRANGER_SECONDS,
            on_stranger=self._receive,
            on_trusted=self._trust,
        )
        stranger.lane.add_done_callback(lambda lane: self._leave(stranger, lane))
        return stranger

    def turn_away(self) -> None:
        """End every incomplete handshake, and any later one; lanes live on."""
        self._is_closed = True
        for stranger in (*self._strangers, *self._guests):
            stranger.fail(_stopped())

    def _receive(self, stranger: HandshakeProtocol) -> None:
        if stranger.takes_reserve:
            stranger.fail(OSError(errno.EMFILE, "too few file descriptors are left for strangers"))
        else:
            total = places(MAX_STRANGERS, descriptor_limit())
            per_address = min(total, MAX_PER_ADDRESS * total // MAX_STRANGERS)
            self._enter(self._strangers, stranger, limit=total, per_address=per_address)

    def _trust(self, guest: HandshakeProtocol) -> None:
        self._strangers.leave(guest)
        self._enter(self._guests, guest, limit=MAX_STRANGERS)

    def _enter(
        self,
        pending: PendingConnections[HandshakeProtocol],
        who: HandshakeProtocol,
        *,
        limit: int,
        per_address: int | None = None,
    ) -> None:
        if self._is_closed:
            who.fail(_stopped())
            return
        pushed = pending.enter(who, limit=limit, address=who.address, per_address=per_address)
        if pushed is not None:
            pushed.push_out()

    def _leave(self, stranger: HandshakeProtocol, lane: asyncio.Future[StreamLane]) -> None:
        self._strangers.leave(stranger)
        self._guests.leave(stranger)
        error = lane.exception()
        if error is None:
            self._on_lane(stranger.handshake.terms, lane.result())
        elif isinstance(error, Exception):
            self._on_refused(error)


def _stopped() -> ConnectionResetError:
    return ConnectionResetError("this node stopped accepting links")
