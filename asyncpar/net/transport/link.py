"""A link: all traffic between this rank and one other, over the negotiated lane."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

from asyncpar.errors import OperationMismatch, PeerLost, ProtocolError, UsageError
from asyncpar.net.transport.flow_control import Inbox, Outbox, Referee, SendNow, Wait, check_grant
from asyncpar.net.transport.lane import Lane, Sending, fail_future
from asyncpar.net.transport.messages import MessageInbox, OnMessage
from asyncpar.net.transport.queue import MessageSending
from asyncpar.net.transport.shared import READS, Exchange, SharedMemory
from asyncpar.net.wire.frame import (
    MESSAGE_GROUP,
    FrameHeader,
    FrameKind,
    Key,
    Payload,
    allocate,
)

_U64 = struct.Struct("<Q")
CONTROL_LIMIT = 64 * 1024
"""Most bytes of a control frame's payload."""

_TAKEN_BACK = 1
"""Fingerprint of a REQUEST in the message group that withdraws an announced message."""

_LENGTH_KINDS = frozenset({FrameKind.REQUEST, FrameKind.GRANT, FrameKind.CREDIT, FrameKind.CHUNK, FrameKind.FREED})
_PAYLOAD_KINDS = frozenset({FrameKind.EAGER, FrameKind.BULK})


class Link:
    """Sends, receives and control frames to and from one peer.  One event loop, never blocks.

    Order between different keys is not guaranteed; a key is used once.  When the peer is lost, everything pending ends
    with ``PeerLost`` and everything new raises it.
    """

    def __init__(
        self,
        *,
        peer: int,
        generation: int,
        referee: Referee,
        on_control: Callable[[int, FrameHeader, bytes], None],
        on_lost: Callable[[int, str], PeerLost],
        on_message: OnMessage,
        max_message_bytes: int,
        message_budget: int,
        allocate: Callable[[int], memoryview] = allocate,
        shared: SharedMemory | None = None,
    ) -> None:
        self.peer = peer
        self.error: PeerLost | None = None
        self._generation = generation
        self._loop = asyncio.get_running_loop()
        self._referee = referee
        self._on_control = on_control
        self._on_lost = on_lost
        self._lane: Lane | None = None
        self._backlog: list[Callable[[], None]] = []
        self._inbox = Inbox(referee=referee, emit=self._emit)
        self._outbox = Outbox(referee=referee)
        self._max_message_bytes = max_message_bytes
        self._messages = MessageInbox(
            deliver=on_message,
            emit=self._emit_for_message,
            max_bytes=max_message_bytes,
            budget=message_budget,
            allocate=allocate,
        )
        self._exchange = None
        if shared is not None:
            reserve, complete = self._messages.reserve_granted, self._messages.complete
            self._exchange = Exchange(shared, peer=peer, emit=self._emit, reserve=reserve, complete=complete)
        self._waiting: dict[Key, DeferredSending] = {}
        self._control_payload = bytearray()
        self._next_message = 0

    # -- the caller's side ---------------------------------------------------------------------------------------

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to the peer, over the lane or through shared memory."""
        shared = 0 if self._exchange is None else self._exchange.exporter.bytes_sent
        return shared + (0 if self._lane is None else self._lane.bytes_sent)

    @property
    def bytes_received(self) -> int:
        """Bytes received from the peer, over the lane or through shared memory."""
        shared = 0 if self._exchange is None else self._exchange.importer.bytes_received
        return shared + (0 if self._lane is None else self._lane.bytes_received)

    @property
    def lane(self) -> Lane | None:
        """The lane in use, None until the link is up."""
        return self._lane

    def attach(self, lane: Lane) -> None:
        """Put the negotiated lane into service and send everything that waits for it.

        A lane that arrives too late, for a link that is lost or already in service, is closed.
        """
        if self.error is not None or self._lane is not None:
            lane.abort(self.error or PeerLost("the link already has a lane", rank=self.peer, cause="second lane"))
            return
        self._lane = lane
        lane.start(self)
        backlog, self._backlog = self._backlog, []
        for send in backlog:  # all of it, even if the lane breaks meanwhile: then the rest ends with the loss
            send()

    def post(self, key: Key, fingerprint: int, buffer: memoryview) -> asyncio.Future[None] | None:
        """Receive into ``buffer`` the peer's payload for ``key``; return None if it has already arrived.

        Payloads that arrived before the peer was lost can still be received.  To stop waiting, call ``withdraw``:
        cancelling the future alone does not stop a payload that is arriving.
        """
        if self._inbox.take_early(key, fingerprint, buffer):
            return None
        if self.error is not None:
            raise self.error.with_traceback(None)  # it is raised again and again, and must not hold all those frames
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._inbox.post(key, fingerprint, buffer, waiter)
        return waiter

    def missing_bytes(self, key: Key) -> int:
        """Return the number of bytes still missing of the receive posted for ``key``."""
        if self._lane is not None and self._inbox.is_arriving(key):
            return self._lane.missing_bytes
        return self._inbox.due_bytes(key)

    def withdraw(self, key: Key) -> None:
        """Withdraw a posted receive: its memory is not written any more once this returns."""
        if self._inbox.withdraw(key) and self._lane is not None:
            self._lane.divert()

    def send(self, key: Key, fingerprint: int, payload: Payload) -> Sending | None:
        """Send ``payload`` (bytes, format ``B``) to the receive that the peer posts for ``key``."""
        if self.error is not None:
            raise self.error.with_traceback(None)  # it is raised again and again, and must not hold all those frames
        if self._lane is None:
            return self._send_later(key, fingerprint, payload)
        expected = self._outbox.grant_fingerprint(key)
        if expected is not None and expected != fingerprint:
            self._referee.mismatch(self._header(FrameKind.GRANT, key, expected, 8))
            decision: SendNow | Wait = Wait(ask=False)  # until the operation fails, whose error says more than lengths
        else:
            decision = self._outbox.admit(key, len(payload))
        if isinstance(decision, SendNow):
            return self._lane.send(self._header(decision.kind, key, fingerprint, len(payload)), payload)
        pending = DeferredSending(fingerprint, payload, self._loop.create_future())
        self._waiting[key] = pending
        if decision.ask:
            self._emit(FrameKind.REQUEST, key, fingerprint, len(payload))
        return pending

    def send_message(self, payload: Payload) -> Sending | None:
        """Send an actor message; messages to one peer are delivered in order.

        Raises ``UsageError`` for a message that is too long for the peer.
        """
        if len(payload) > self._max_message_bytes:
            raise UsageError(
                f"message: at most {self._max_message_bytes} bytes can be sent, got {len(payload)}; send it in parts "
                "(an endpoint that yields them is a stream), or arrays by comm.send and recv or a collective"
            )
        number = self._next_message
        self._next_message += 1
        if self._lane is not None and self.error is None and self._outbox.spend(len(payload)):
            header = FrameHeader(FrameKind.EAGER, self._generation, MESSAGE_GROUP, number, 0, 0, len(payload))
            return self._lane.send(header, payload)
        key = Key(MESSAGE_GROUP, number, 0)
        sending = self.send(key, 0, payload)
        if sending is None:
            return None
        return MessageSending(sending, lambda: self._take_back(key))

    def deliver_to(self, on_message: OnMessage) -> None:
        """Deliver messages to ``on_message`` from now on."""
        self._messages.deliver = on_message

    def control(self, kind: FrameKind, key: Key, payload: bytes = b"") -> None:
        """Send a control frame without waiting; it is dropped if the peer is lost."""
        if self.error is not None:
            return
        if self._lane is None:
            self._backlog.append(lambda: self.control(kind, key, payload))
            return
        self._lane.send(self._header(kind, key, 0, len(payload)), memoryview(payload))

    def forget(self, group: int, sequence: int | None = None) -> None:
        """Drop every trace of an operation that is over."""
        self._inbox.forget(group, sequence)
        self._outbox.forget(group, sequence)
        over = (group,) if sequence is None else (group, sequence)
        for key in [key for key in self._waiting if key[: len(over)] == over]:
            self._waiting.pop(key).release()

    def fail(self, error: PeerLost) -> None:
        """End everything that waits for the peer, now and later, with ``error``.

        Anything that still arrives is dropped.  Frames already handed to the lane go out, if the lane lives.
        """
        if self.error is not None:
            return
        self.error = error
        if self._lane is not None:
            self._lane.divert()
        self._inbox.fail(error)
        if self._exchange is not None:
            self._exchange.fail(error)
        waiting, self._waiting = self._waiting, {}
        for pending in waiting.values():
            fail_future(pending.done, error)
        backlog, self._backlog = self._backlog, []
        for send in backlog:
            send()

    async def close(self) -> None:
        """Close the lane after flushing it."""
        if self._lane is not None:
            await self._lane.close()

    # -- the lane's side (LaneEvents) ------------------------------------------------------------------------------

    def lend(self, header: FrameHeader) -> memoryview | None:
        if self.error is not None:
            return None
        if header.generation != self._generation:
            raise ProtocolError(f"frame generation: this world has {self._generation}, got {header.generation}")
        if header.kind is FrameKind.STRIPED:
            raise ProtocolError("a payload came in parts over a single connection")
        if header.kind in _PAYLOAD_KINDS:
            if header.group == MESSAGE_GROUP:
                return self._messages.lend(header)
            return self._inbox.lend(header)
        limit = _U64.size if header.kind in _LENGTH_KINDS else CONTROL_LIMIT
        if header.length > limit or (header.kind in _LENGTH_KINDS and header.length != limit):
            raise ProtocolError(f"{header.kind.name} frame: at most {limit} bytes of payload, got {header.length}")
        self._control_payload = bytearray(header.length)
        return memoryview(self._control_payload)

    def accept(self, header: FrameHeader, payload: memoryview) -> bool:
        if header.group != MESSAGE_GROUP or header.kind is not FrameKind.EAGER:
            return False
        if self.error is not None or header.generation != self._generation:
            return False
        return self._messages.accept(header, payload)

    def landed(self, header: FrameHeader) -> None:
        match header.kind:
            case FrameKind.EAGER | FrameKind.BULK:
                inbox = self._messages if header.group == MESSAGE_GROUP else self._inbox
                inbox.landed(header)
            case FrameKind.GRANT:
                self._granted(header, _U64.unpack(self._control_payload)[0])
            case FrameKind.CHUNK | FrameKind.FREED:
                self._moved(header, _U64.unpack(self._control_payload)[0])
            case FrameKind.CREDIT:
                self._outbox.credit(_U64.unpack(self._control_payload)[0])
            case FrameKind.REQUEST if header.group == MESSAGE_GROUP and header.fingerprint == _TAKEN_BACK:
                self._messages.taken_back(header)
            case FrameKind.REQUEST if header.group == MESSAGE_GROUP:
                self._messages.request(header, _U64.unpack(self._control_payload)[0])
            case FrameKind.REQUEST:
                self._inbox.request(header)
            case _:
                self._on_control(self.peer, header, bytes(self._control_payload))

    def lost(self, cause: str) -> PeerLost:
        error = self.error or self._on_lost(self.peer, cause)
        self.fail(error)
        return error

    # -- inside ----------------------------------------------------------------------------------------------------

    def _header(self, kind: FrameKind, key: Key, fingerprint: int, length: int) -> FrameHeader:
        return FrameHeader(kind, self._generation, key.group, key.sequence, key.tag, fingerprint, length)

    def _emit(self, kind: FrameKind, key: Key, fingerprint: int, value: int) -> None:
        if self.error is not None:
            return
        if self._lane is None:
            self._backlog.append(lambda: self._emit(kind, key, fingerprint, value))
            return
        self._lane.send(self._header(kind, key, fingerprint, _U64.size), memoryview(_U64.pack(value)))

    def _emit_for_message(self, kind: FrameKind, key: Key, fingerprint: int, value: int) -> None:
        reads = kind is FrameKind.GRANT and self._exchange is not None and self._exchange.importer.can_read(value)
        self._emit(kind, key, READS if reads else fingerprint, value)

    def _moved(self, header: FrameHeader, offset: int) -> None:
        """Handle a chunk of shared memory that changes owner."""
        if self._exchange is None or header.group != MESSAGE_GROUP:
            raise ProtocolError(f"{header.kind.name} frame: the ranks of this link share no memory")
        self._exchange.moved(header, offset)

    def _take_back(self, key: Key) -> None:
        self._waiting.pop(key, None)
        self._emit(FrameKind.REQUEST, key, _TAKEN_BACK, 0)

    def _send_later(self, key: Key, fingerprint: int, payload: Payload) -> Sending:
        pending = DeferredSending(fingerprint, payload, self._loop.create_future())
        self._backlog.append(lambda: pending.begin(lambda: self.send(key, fingerprint, payload)))
        return pending

    def _granted(self, header: FrameHeader, length: int) -> None:
        pending = self._waiting.get(header.key)
        if pending is None:
            self._outbox.granted(header, length)
            return
        if header.group == MESSAGE_GROUP:
            reads = header.fingerprint == READS
        elif pending.fingerprint != header.fingerprint:
            self._referee.mismatch(header)
            return
        else:
            reads = False
        del self._waiting[header.key]
        pending.begin(lambda: self._send_granted(header.key, pending, length, reads=reads))

    def _send_granted(self, key: Key, pending: DeferredSending, length: int, *, reads: bool) -> Sending | None:
        check_grant(key, length, len(pending.payload))
        assert self._lane is not None
        if reads and self._exchange is not None and self._exchange.exporter.is_ready():
            return self._exchange.exporter.send(key, pending.payload)
        return self._lane.send(
            self._header(FrameKind.BULK, key, pending.fingerprint, len(pending.payload)), pending.payload
        )


class DeferredSending(Sending):
    """A send that waits for its grant, or for the lane to come up."""

    __slots__ = ("_has_gone", "_inner", "_is_dropped", "fingerprint", "payload")

    def __init__(self, fingerprint: int, payload: Payload, done: asyncio.Future[None]) -> None:
        self.fingerprint = fingerprint
        self.payload: Payload = payload
        self.done = done
        self._inner: Sending | None = None
        self._is_dropped = False
        self._has_gone = False

    def begin(self, send: Callable[[], Sending | None]) -> None:
        """Start the real send, and end as it ends."""
        if self._is_dropped:
            return
        try:
            inner = send()
        except (PeerLost, OperationMismatch) as error:
            fail_future(self.done, error)
            return
        if inner is not None:
            self._inner = inner
            inner.done.add_done_callback(self._finish)
        else:
            self._has_gone = True
            if not self.done.done():
                self.done.set_result(None)

    @property
    def waiting_bytes(self) -> int:
        if self._has_gone:
            return 0
        return len(self.payload) if self._inner is None else self._inner.waiting_bytes

    def release(self) -> bool:
        goes_out = self._has_gone if self._inner is None else self._inner.release()
        self._is_dropped = True
        self.payload = memoryview(b"")
        self.done.cancel()
        return goes_out

    def _finish(self, inner: asyncio.Future[None]) -> None:
        error = None if inner.cancelled() else inner.exception()
        if inner.cancelled():
            self.done.cancel()
        elif error is not None:
            fail_future(self.done, error)
        elif not self.done.done():
            self.done.set_result(None)
