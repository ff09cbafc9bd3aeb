"""The lane of a simulation: production framing over a simulated connection.

Bytes are written and read by the parts of every byte lane: ``FrameSealer`` numbers and seals, ``SendQueue`` keeps the
data that the connection cannot take yet in the sender's memory, ``FrameReader`` and ``FrameVerifier`` parse and verify.
Only the socket is simulated: at most a window of bytes is in transit, and arriving data is sometimes cut in two.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Final

from asyncpar.errors import PeerLost, ProtocolError
from asyncpar.net.transport.lane import MAX_FRAME_BYTES, Lane, LaneEvents, Sending
from asyncpar.net.transport.protection import DAMAGED
from asyncpar.net.transport.queue import SendQueue
from asyncpar.net.wire.frame import (
    SEALED_BYTES,
    TAIL_BYTES,
    FrameDamaged,
    FrameHeader,
    FrameSealer,
    FrameVerifier,
    Payload,
    WholeSink,
    encode_header,
)
from asyncpar.net.wire.handshake import LinkTerms, seed_of
from asyncpar.net.wire.reader import FrameReader
from asyncpar.testing.simulation.network import RESET, SimulatedNetwork, SimulatedPipe
from asyncpar.testing.simulation.process import SimulatedProcess

FLUSH_SECONDS: Final = 1.0
CUT_CHANCE: Final = 0.05
"""The probability that arriving data comes in two pieces."""

_CLOSED = "the peer closed the connection"


class SimLane(Lane):
    """One end of a simulated connection, in ``process``."""

    kind = "sim"

    def __init__(
        self, network: SimulatedNetwork, process: SimulatedProcess, dice: Random, terms: LinkTerms, *, rank: int
    ) -> None:
        peer = terms.listener if rank == terms.dialer else terms.dialer
        self.process = process
        self._network = network
        self._loop = network.loop
        self._dice = dice
        self._sealer = FrameSealer(seed_of(terms, rank), checks_payloads=terms.checks_payloads)
        self._verifier = FrameVerifier(seed_of(terms, peer), checks_payloads=terms.checks_payloads)
        self._queue = SendQueue(self._sealer)
        self._writer = self._queue.writer
        self._room = network.conditions.window
        self._peer: SimLane = self
        self._out: SimulatedPipe | None = None
        self._reader: FrameReader | None = None
        self._events: LaneEvents | None = None
        self._early: list[bytes | str] = []
        self._rest = b""
        """The second half of a piece that was cut."""
        self._is_open = True
        self._is_leaving = False
        self._broken: str | None = None
        self._flushed: asyncio.Future[None] | None = None

    @staticmethod
    def join(network: SimulatedNetwork, one: SimLane, other: SimLane) -> None:
        """Make a connection of two ends."""
        network.lanes |= {lane: None for lane in (one, other) if lane._is_open}  # the dialer may have given up
        one._peer, other._peer = other, one
        one._out = network.open_pipe(one.process, other.process, other.receive)
        other._out = network.open_pipe(other.process, one.process, one.receive)

    # -- Lane ------------------------------------------------------------------------------------------------------

    @property
    def missing_bytes(self) -> int:
        return 0 if self._reader is None else self._reader.missing_bytes

    def start(self, events: LaneEvents) -> None:
        if not self._is_open:
            events.lost(self._broken or _CLOSED)
            return
        self._events = events
        accept = events.accept if isinstance(events, WholeSink) else None
        self._reader = FrameReader(events, max_length=MAX_FRAME_BYTES, accept=accept, verifier=self._verifier)
        early, self._early = self._early, []
        for piece in early:
            self.receive(piece)

    def send(self, header: FrameHeader, payload: Payload) -> Sending | None:
        if not self._is_open or self._is_leaving:
            return None
        head = self._sealer.seal(encode_header(header))
        checksum = self._sealer.begin_payload(head, len(payload))
        size = SEALED_BYTES + len(payload) + (0 if checksum is None else TAIL_BYTES)
        self._bytes_sent += size
        if size <= self._room and not self._writer.waiting_bytes:
            tail = b""
            if checksum is not None:
                checksum.cover(payload, len(payload))
                tail = checksum.tail()
            self._write(head + bytes(payload) + tail)
            return None
        sending = self._queue.push(header, head, payload, checksum=checksum)
        self._pump()
        return sending

    def divert(self) -> None:
        if self._reader is not None:
            self._reader.divert()

    def abort(self, error: PeerLost) -> None:
        if self._is_open:
            self._send_end(_CLOSED)
            self._shut(error)

    async def close(self) -> None:
        if not self._is_open or self._flushed is not None:
            return
        self._stop_reading()
        self._flushed = self._loop.create_future()
        try:
            if self._writer.waiting_bytes and self._broken is None:
                await self._queue.flush(self._flushed, FLUSH_SECONDS)
        except TimeoutError:
            pass  # the peer does not read: enough was done for it
        finally:
            self.abort(PeerLost("the lane was closed before this was sent", cause="closed"))

    # -- the network's side ----------------------------------------------------------------------------------------

    @property
    def peer_node(self) -> int | None:
        """The node of the other end."""
        return self._peer.process.node

    def send_reset(self) -> None:
        """Notify the other end, behind all data sent so far, that this one is dead."""
        self._send_end(RESET)

    def receive(self, piece: bytes | str) -> None:
        """Take arriving bytes, or the reason for which there are no more."""
        if not self._is_open:
            if isinstance(piece, bytes):  # no process is there: a kernel answers with a reset
                self._send_end(RESET)
            return
        if isinstance(piece, bytes) and self._reader is None and not self._is_read_away:
            self._early.append(piece)
        elif isinstance(piece, str):
            if self._early:
                self._early.append(piece)
            else:
                self._feed_rest()
                self._end(piece)
        else:
            self._peer.acknowledge(len(piece))
            self._bytes_received += len(piece)
            is_cut = not self._rest and len(piece) > 1 and self._dice.random() < CUT_CHANCE
            place = self._dice.randrange(1, len(piece)) if is_cut else len(piece)
            if self._rest:
                self._rest += piece
                return
            if is_cut:
                self._rest = piece[place:]
                self._loop.call_soon(self._feed_rest)
            self._feed(piece[:place])

    def acknowledge(self, count: int) -> None:
        """Record that the peer has read ``count`` bytes."""
        self._room += count
        if self._writer.waiting_bytes:
            when = self._loop.now + self._network.conditions.latency
            self._loop.schedule(self.process, when, self._pump)

    def reset(self, cause: str = RESET) -> None:
        """End this side at once, as a network does; the other is not notified."""
        if self._is_open:
            self._end(cause)

    # -- inside ----------------------------------------------------------------------------------------------------

    @property
    def _is_read_away(self) -> bool:
        """Whether arriving data is only read to be dropped."""
        return self._is_leaving or self._flushed is not None

    def _feed_rest(self) -> None:
        rest, self._rest = self._rest, b""
        if rest:
            self._feed(rest)

    def _feed(self, piece: bytes) -> None:
        if self._reader is None:
            return
        try:
            self._reader.feed(piece)
        except ProtocolError as error:
            self._refuse(error)

    def _refuse(self, error: ProtocolError) -> None:
        """End the lane after bytes that violate the protocol; the owner sends the reason to the peer over this lane."""
        cause = f"{DAMAGED}: sim lane: {error}" if isinstance(error, FrameDamaged) else f"protocol error: {error}"
        events = self._events
        self._stop_reading()
        if events is None:
            self._end(cause)
            return
        lost = events.lost(cause)
        if not self._is_open:
            return
        self._is_leaving = True
        self._queue.release_all(lost)
        self._pump()

    def _write(self, piece: bytes) -> None:
        assert self._out is not None
        self._room -= len(piece)
        self._network.record(self._out, piece)
        self._network.send(self._out, piece)

    def _pump(self) -> None:
        """Write waiting data, as far as there is room."""
        if not self._is_open:
            return
        while self._room > 0 and self._writer.waiting_bytes:
            piece = b"".join(self._writer.segments(self._room))
            self._writer.advance(len(piece))
            self._write(piece)
        if not self._writer.waiting_bytes:
            if self._flushed is not None and not self._flushed.done():
                self._flushed.set_result(None)
            if self._is_leaving:
                self.abort(PeerLost("the lane is over", cause="closed"))

    def _send_end(self, cause: str) -> None:
        if self._out is not None:
            self._network.send(self._out, cause)

    def _end(self, cause: str) -> None:
        """End the channel, and notify the owner once."""
        if self._reader is not None and not self._reader.is_between_frames and cause == _CLOSED:
            cause = "the peer closed the connection in the middle of a frame"
        self._broken = self._broken or cause
        events, self._events = self._events, None
        self._send_end(_CLOSED)
        if events is None:
            self._shut(PeerLost(cause, cause=cause))
        else:
            self._shut(None)
            self._queue.fail(events.lost(self._broken))

    def _stop_reading(self) -> None:
        self._events = None
        if self._reader is not None:
            self._reader.stop()
        self._reader = None

    def _shut(self, error: PeerLost | None) -> None:
        self._is_open = False
        self._stop_reading()
        self._early.clear()
        self._network.lanes.pop(self, None)
        if self._flushed is not None and not self._flushed.done():
            self._flushed.set_result(None)
        if error is not None:
            self._queue.fail(error)
