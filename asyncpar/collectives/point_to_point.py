"""Messages between two ranks of a group.

Theory of operation.  A message is an envelope of fixed size (tag 0) and a body (tag 1).  Messages from one rank to
another with one tag are numbered, and are received in that order.  As soon as a receive wants a message of a source, an
envelope is posted for it: a *slot*.  A receive from any source posts one for every rank, and takes the first that
fills; the other slots stay for receives to come, so nothing is lost and no memory is promised twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np

from asyncpar.collectives.arrays import Array
from asyncpar.collectives.call import Call, MessageCall, refuse
from asyncpar.collectives.engine import Engine
from asyncpar.collectives.ledger import TAG_SHIFT, ChannelLedger, hash64
from asyncpar.collectives.operation import Group, Operation
from asyncpar.collectives.protocol import ENVELOPE_BYTES, Envelope, decode_envelope, describe, encode_envelope
from asyncpar.core.concurrency.tasks import INLINE_COPY_BYTES, is_home_loop, off_loop
from asyncpar.errors import OperationMismatch, PeerLost, ProtocolError
from asyncpar.net.transport.lane import fail_future
from asyncpar.net.transport.links import LEFT
from asyncpar.net.wire.payload import UnwrittenPayload

T = TypeVar("T")

MAX_BYTES = 1 << 30
"""Largest message that is received into memory of our own making."""

_DESCRIPTION = describe("message", (), "direct")


class ReceivedMessage(NamedTuple):
    """A received array, and who sent it (a rank of the group)."""

    source: int
    array: Array
    is_object: bool


class _Slot:
    """The next message of one source and tag."""

    def __init__(self, source: int, tag: int, operation: Operation) -> None:
        self.source = source
        self.tag = tag
        self.operation = operation
        self.envelope = bytearray(ENVELOPE_BYTES)
        self.is_filled = False


class _PendingReceive:
    """A receive that waits for its slot."""

    def __init__(self, source: int | None, tag: int, operation: Operation, filled: asyncio.Future[None]) -> None:
        self.source = source
        self.tag = tag
        self.operation = operation
        self.filled = filled
        self.slot: _Slot | None = None
        self.refusal: BaseException | None = None
        """What the caller got instead of a receive, which takes its message all the same."""

    def wants(self, source: int, tag: int) -> bool:
        return tag == self.tag and self.source in (None, source)


class PointToPoint:
    """Sends and receives of one rank in the group of ``engine``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._table = engine.table
        self._slots: dict[tuple[int, int], _Slot] = {}
        self._requests: list[_PendingReceive] = []

    def pending(self) -> list[Operation]:
        """Return the messages of this rank that are not over."""
        channels = [self._table.find(self._number(*pair)) for pair in self._pairs()]
        return [operation for channel in channels if channel is not None for operation in channel.pending()]

    def give_up(self) -> None:
        """There will be no more messages, for the reason that the group has: who waits for one here is to know."""
        for pair in self._pairs():
            self._channel(*pair).given_up = self._engine.group.given_up

    def close(self) -> list[int]:
        """There will be no more messages, sent or received; return under which numbers others wait for them."""
        self._slots.clear()
        self._requests.clear()
        return [self._number(*pair) for pair in self._pairs()]

    # -- sending ---------------------------------------------------------------------------------------------------

    def send(self, x: Array | UnwrittenPayload, dest: int, tag: int) -> Call[None]:
        """Send ``x``, an array or an object as bytes, to the receive that ``dest`` posts for it."""
        self._table.context.check_home_loop("send")
        self._engine.group.check_open()
        if isinstance(x, UnwrittenPayload):
            envelope = encode_envelope(np.broadcast_to(np.uint8(0), x.nbytes), is_object=True)
        else:
            envelope = encode_envelope(x, is_object=False)
        channel = self._channel(self._engine.rank, dest)
        peer = self._engine.ranks[dest]
        sequence = _ledger(channel).allot(tag)
        operation = self._operation("send", f"to rank {peer}", tag, channel, channel, sequence)
        self._table.enter(operation)

        async def body(operation: Operation) -> None:
            if isinstance(x, UnwrittenPayload):
                payload = await off_loop(x.write, nbytes=x.nbytes, inline=INLINE_COPY_BYTES)
            else:
                payload = np.ascontiguousarray(x).reshape(-1).view(np.uint8).data
            sendings = [operation.send(peer, 0, memoryview(envelope)), operation.send(peer, 1, payload)]
            for sending in sendings:
                if sending is not None:
                    await operation.sent(peer, sending)

        return MessageCall(operation, body, self._engine.count)

    def refuse_send(self, dest: int, tag: int, error: BaseException) -> None:
        """Give a send its place that raises ``error`` instead: the receive that would have got it ends."""
        if not self._is_open():
            return
        channel = self._channel(self._engine.rank, dest)
        place = f"to rank {self._engine.ranks[dest]}"
        operation = self._operation("send", place, tag, channel, channel, _ledger(channel).allot(tag))
        self._table.enter(operation)
        refuse(operation, error)

    def _is_open(self) -> bool:
        return is_home_loop(self._table.loop) and self._engine.group.given_up is None

    # -- receiving -------------------------------------------------------------------------------------------------

    def refuse_receive(self, source: int | None, tag: int, error: BaseException) -> None:
        """Let a receive that raises ``error`` instead take its message: the send of it ends, if it is not over.

        One from any rank has no message of its own, and takes none.
        """
        if source is None or not self._is_open():
            return
        home = self._channel(source, self._engine.rank)
        operation = self._operation("recv", f"from rank {self._engine.ranks[source]}", tag, home, None, 0)
        home.loose.add(operation)
        request = _PendingReceive(source, tag, operation, self._table.loop.create_future())
        request.refusal = error
        self._requests.append(request)
        self._listen(request)
        self._match()

    def receive(
        self,
        source: int | None,
        tag: int,
        out: Array | None,
        *,
        convert: Callable[[ReceivedMessage], T],
        is_object: bool = False,
    ) -> Call[T]:
        """Receive the next message of ``source`` (None: of anybody) into ``out``, or into a fresh array.

        ``is_object`` says what it must be.
        """
        self._table.context.check_home_loop("recv")
        self._engine.group.check_open()
        home = self._engine.group if source is None else self._channel(source, self._engine.rank)
        place = "from any rank" if source is None else f"from rank {self._engine.ranks[source]}"
        operation = self._operation("recv", place, tag, home, None, 0)
        home.loose.add(operation)
        request = _PendingReceive(source, tag, operation, self._table.loop.create_future())
        self._requests.append(request)
        self._listen(request)
        self._match()

        async def body(operation: Operation) -> T:
            slot = await self._matched(request)
            envelope = decode_envelope(slot.envelope)
            if envelope.is_object != is_object:
                mine = "an object; use recv" if is_object else "an array; use recv_object"
                raise self._mismatch(slot, envelope, mine)
            array = self._memory(operation, slot, envelope, out)
            work = array if array.flags.c_contiguous else np.empty(array.shape, array.dtype)
            peer = self._engine.ranks[slot.source]
            future = operation.post(peer, 1, work.reshape(-1).view(np.uint8).data)
            if future is not None:
                await operation.received(peer, 1, future)
            if work is not array:
                array[...] = work
            return convert(ReceivedMessage(slot.source, array, envelope.is_object))

        return MessageCall(operation, body, self._engine.count, gone=lambda: self._gone(request))

    async def _matched(self, request: _PendingReceive) -> _Slot:
        try:
            if not request.filled.done():
                peer = None if request.source is None else self._engine.ranks[request.source]
                await request.operation.wait(peer, request.filled)
            request.filled.result()
        finally:
            if request in self._requests:
                self._requests.remove(request)
        assert request.slot is not None
        return request.slot

    def _memory(self, operation: Operation, slot: _Slot, envelope: Envelope, out: Array | None) -> Array:
        if out is None:
            if envelope.nbytes > MAX_BYTES:
                raise ProtocolError(
                    f"{operation.label}: at most {MAX_BYTES} bytes are received without out=, got {envelope.nbytes}"
                )
            return np.empty(envelope.shape, envelope.dtype)
        if (envelope.dtype, envelope.shape) != (out.dtype, out.shape):
            raise self._mismatch(slot, envelope, str(Envelope(out.dtype, out.shape, False)))
        return out

    def _mismatch(self, slot: _Slot, envelope: Envelope, mine: str) -> OperationMismatch:
        return OperationMismatch(
            f"rank {self._engine.ranks[slot.source]} sends {envelope} where "
            f"rank {self._table.links.rank} receives {mine} (tag {slot.tag})"
        )

    def _gone(self, request: _PendingReceive) -> PeerLost | None:
        """Return why nothing can come for ``request``: its source is gone; or one has failed, or all have left."""
        lost = self._table.links.lost
        if request.filled.done() or not lost:
            return None
        if request.source is not None:
            return lost.get(self._engine.ranks[request.source])
        errors = [error for rank, error in lost.items() if rank in self._engine.others]
        failed = next((error for error in errors if error.cause != LEFT), None)
        return failed or (errors[0] if errors and len(errors) == len(self._engine.others) else None)

    # -- slots -----------------------------------------------------------------------------------------------------

    def _listen(self, request: _PendingReceive) -> None:
        """See to it that there is a slot for every source that ``request`` takes messages of."""
        everyone = [rank for rank in range(self._engine.size) if rank != self._engine.rank]
        for source in everyone if request.source is None else [request.source]:
            if (source, request.tag) not in self._slots:
                self._open_slot(source, request.tag)
        if request.source is not None:
            slot = self._slots.get((request.source, request.tag))
            request.operation.stand_in = None if slot is None else slot.operation

    def _open_slot(self, source: int, tag: int) -> None:
        channel = self._channel(source, self._engine.rank)
        peer = self._engine.ranks[source]
        sequence = _ledger(channel).allot(tag)
        operation = self._operation("recv", f"from rank {peer}", tag, channel, channel, sequence)
        slot = self._slots[source, tag] = _Slot(source, tag, operation)
        self._table.enter(operation)
        if operation.failure is not None:  # not at once: the next one may have failed too, and so on
            self._table.loop.call_soon(self._end_slot, slot, operation.failure)
            return
        try:
            future = operation.post(peer, 0, memoryview(slot.envelope))
        except PeerLost as error:
            self._end_slot(slot, error)
            return
        if future is None:
            slot.is_filled = True
        else:
            operation.waiter = future
            future.add_done_callback(lambda future: self._filled(slot, future))

    def _filled(self, slot: _Slot, future: asyncio.Future[None]) -> None:
        operation = slot.operation
        error = None if future.cancelled() else future.exception()
        if operation.failure is not None or future.cancelled() or error is not None:
            self._end_slot(slot, operation.failure or error)
            return
        operation.waiter = None
        operation.posts.clear()
        slot.is_filled = True
        self._match()

    def _end_slot(self, slot: _Slot, error: BaseException | None) -> None:
        """The message of ``slot`` will not come: tell who was to get it, or all who wait if its source is gone."""
        self._slots.pop((slot.source, slot.tag), None)
        slot.operation.discard()
        wanting = [
            request
            for request in self._requests
            if request.wants(slot.source, slot.tag) and not request.operation.is_over
        ]
        if isinstance(error, PeerLost):
            for request in wanting:
                may_come_of_others = request.source is None and not self._table.links.is_closing
                self._refuse(request, self._gone(request) if may_come_of_others else error)
        elif wanting:
            self._refuse(wanting[0], error)
            for request in wanting[1:]:
                self._listen(request)
            self._match()

    def _refuse(self, request: _PendingReceive, error: BaseException | None) -> None:
        if error is not None:
            self._requests.remove(request)
            fail_future(request.filled, error)

    def _match(self) -> None:
        """Give filled slots to the requests that have waited longest for them."""
        for broken in [slot for slot in self._slots.values() if slot.is_filled and slot.operation.failure is not None]:
            self._end_slot(broken, broken.operation.failure)
        for request in list(self._requests):
            if request.operation.is_over or request.operation.failure is not None:
                self._requests.remove(request)
                continue
            filled = (slot for slot in self._slots.values() if slot.is_filled and request.wants(slot.source, slot.tag))
            slot = next(filled, None)
            if slot is not None:
                self._requests.remove(request)
                self._hand_over(slot, request)
                for other in list(self._requests):
                    if other.wants(slot.source, slot.tag):
                        self._listen(other)

    def _hand_over(self, slot: _Slot, request: _PendingReceive) -> None:
        del self._slots[slot.source, slot.tag]
        incoming = slot.operation
        incoming.is_over = True
        assert incoming.route is not None
        request.operation.bind(incoming.route, incoming.sequence, self._engine.ranks[slot.source])
        request.slot = slot
        if request.refusal is not None:
            refuse(request.operation, request.refusal)
        elif not request.filled.done():
            request.filled.set_result(None)

    # -- making operations -----------------------------------------------------------------------------------------

    def _channel(self, source: int, dest: int) -> Group:
        """Return the group in which messages from ``source`` to ``dest`` are numbered."""
        ranks = (self._engine.ranks[source], self._engine.ranks[dest])
        number = self._number(source, dest)
        channel = self._table.find(number)
        if channel is None:
            group = self._engine.group
            channel = Group(number=number, name=group.name, ranks=ranks, ledger=ChannelLedger(), limits=group.limits)
            self._table.add(channel)
            group.channels.append(number)
        return channel

    def _pairs(self) -> list[tuple[int, int]]:
        """Return from whom and to whom this rank has messages."""
        me, others = self._engine.rank, range(self._engine.size)
        return [pair for other in others if other != me for pair in ((me, other), (other, me))]

    def _number(self, source: int, dest: int) -> int:
        ranks = self._engine.ranks
        return hash64("messages", self._engine.group.number, ranks[source], ranks[dest])

    def _operation(self, name: str, place: str, tag: int, home: Group, route: Group | None, sequence: int) -> Operation:
        number = "" if route is None else f" #{sequence & ((1 << TAG_SHIFT) - 1)}"
        me = self._table.links.rank
        return Operation(
            context=self._table.context,
            home=home,
            route=route,
            sequence=sequence,
            description=_DESCRIPTION,
            name=name,
            label=f"{name}{number} {place} (tag {tag})",
            audience=() if route is None else tuple(rank for rank in route.ranks if rank != me),
        )


def _ledger(channel: Group) -> ChannelLedger:
    assert isinstance(channel.ledger, ChannelLedger)
    return channel.ledger
