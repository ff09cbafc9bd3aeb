"""Messages between two ranks of a group.

Theory of operation.  A message is an envelope of fixed size (``ENVELOPE``) and a body (``BODY``).  Messages from one
rank to another with one tag are numbered, and are received in that order.  As soon as a receive wants a message from a
source, an envelope is posted for it: a *slot*.  A receive from any source posts one slot for every rank, and takes the
first that fills; the other slots stay for later receives, so nothing is lost and no memory is promised twice.

For a larger array on a CUDA device the body is replaced by a description of the sender's device; the receiver chooses
(``ANSWER``) how the array is sent: by NCCL (``device/pairs.py``), or through the host (``STAGED``).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from asyncpar.collectives.arrays import Array
from asyncpar.collectives.call import Call, MessageCall, refuse
from asyncpar.collectives.engine import Engine
from asyncpar.collectives.ledger import TAG_SHIFT, ChannelLedger, channel_number
from asyncpar.collectives.operation import Group, Operation
from asyncpar.collectives.protocol import DECLINED, ENVELOPE_BYTES, Envelope, decode_envelope, describe, encode_envelope
from asyncpar.core.concurrency.tasks import INLINE_COPY_BYTES, is_home_loop, off_loop
from asyncpar.core.observe.records import NO_PEER, UNBOUND, EventKind, EventState, GroupIdentity
from asyncpar.errors import OperationMismatch, PeerLost, ProtocolError
from asyncpar.net.transport.lane import fail_future
from asyncpar.net.transport.links import LEFT
from asyncpar.net.wire.payload import UnwrittenPayload

T = TypeVar("T")

MAX_BYTES = 1 << 30
"""Largest message, in bytes, that is received into memory allocated here."""

_NAMED_APART = 4096
"""Shapes of messages are recorded until the recorder has this many names."""

ENVELOPE, BODY, ANSWER, STAGED = range(4)
"""The frames of one message."""

_DESCRIPTION = describe("message", (), "direct")


class ReceivedMessage(NamedTuple):
    """A received array, and its sender (a rank of the group)."""

    source: int
    array: Array
    is_object: bool
    has_been_taken: bool = False
    """Whether ``take_body`` has received it; if so, ``array`` has no content."""


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
        """The error that the caller got instead of a receive, which takes its message nevertheless."""

    def wants(self, source: int, tag: int) -> bool:
        return tag == self.tag and self.source in (None, source)


SendBody: TypeAlias = Callable[[Operation, int, bytes], Awaitable[None]]
"""``send_body(operation, peer, envelope)`` sends a message whose content is not in host memory."""

TakeBody: TypeAlias = Callable[[Operation, int], Awaitable[bool]]
"""``take_body(operation, peer)`` receives a message that its sender has on a device; False: it comes as ``STAGED``."""


class PointToPoint:
    """Sends and receives of one rank in the group of ``engine``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._table = engine.table
        self._slots: dict[tuple[int, int], _Slot] = {}
        self._requests: list[_PendingReceive] = []

    def pending(self) -> list[Operation]:
        """Return the pending messages of this rank."""
        channels = [self._table.find(self._number(*pair)) for pair in self._pairs()]
        return [operation for channel in channels if channel is not None for operation in channel.pending()]

    def give_up(self) -> None:
        """End all messages for the group's reason, which waiters here receive."""
        for pair in self._pairs():
            self._channel(*pair).given_up = self._engine.group.given_up

    def end(self) -> list[tuple[int, int]]:
        """End all messages, which have failed.

        Returns the ranks that are linked to this one, with the numbers under which they exchange messages with it.
        """
        self._slots.clear()
        self._requests.clear()
        engine, is_up = self._engine, self._table.links.is_up
        places = [place for place, rank in enumerate(engine.ranks) if is_up(rank)]
        to_here = [(engine.ranks[place], self._number(place, engine.rank)) for place in places]
        return to_here + [(engine.ranks[place], self._number(engine.rank, place)) for place in places]

    def close(self) -> list[int]:
        """End all messages, sent or received; return the numbers under which other ranks wait for them."""
        self._slots.clear()
        self._requests.clear()
        return [self._number(*pair) for pair in self._pairs()]

    # -- sending ---------------------------------------------------------------------------------------------------

    def send(self, x: Array | UnwrittenPayload, dest: int, tag: int) -> Call[None]:
        """Send ``x``, an array or an object as bytes, to the receive that ``dest`` posts for it."""
        self._check_open("send")
        if isinstance(x, UnwrittenPayload):
            envelope = encode_envelope(np.broadcast_to(np.uint8(0), x.nbytes), is_object=True)
        else:
            envelope = encode_envelope(x, is_object=False)
        operation = self._sending(dest, tag, Operation, x)
        peer = self._engine.ranks[dest]

        async def body(operation: Operation) -> None:
            if isinstance(x, UnwrittenPayload):
                content = await off_loop(x.write, nbytes=x.nbytes, inline=INLINE_COPY_BYTES)
            else:
                content = np.ascontiguousarray(x).reshape(-1).view(np.uint8).data
            await transmit(operation, peer, {ENVELOPE: memoryview(envelope), BODY: content})

        return MessageCall(operation, body, self._engine.count)

    def send_from_device(
        self,
        envelope: bytes,
        dest: int,
        tag: int,
        send_body: SendBody,
        *,
        kind: type[Operation],
        call: type[MessageCall[None]],
    ) -> Call[None]:
        """Send the content of ``send_body``, as an operation of ``kind`` that ``call`` runs."""
        self._check_open("send")
        operation = self._sending(dest, tag, kind, decode_envelope(envelope))
        peer = self._engine.ranks[dest]
        return call(operation, lambda operation: send_body(operation, peer, envelope), self._engine.count)

    def _sending(self, dest: int, tag: int, kind: type[Operation], x: Array | UnwrittenPayload | Envelope) -> Operation:
        channel = self._channel(self._engine.rank, dest)
        sequence = _ledger(channel).allot(tag)
        place = f"to rank {self._engine.ranks[dest]}"
        operation = self._operation("send", place, tag, channel, channel, sequence, kind=kind)
        self._record(operation, EventKind.SEND, x, self._engine.ranks[dest])
        self._table.enter(operation)
        return operation

    def _check_open(self, what: str) -> None:
        self._table.context.check_home_loop(what)
        self._engine.group.check_open()

    def refuse_send(self, dest: int, tag: int, error: BaseException) -> None:
        """Take the place of a send that raises ``error`` instead: the receive that would have got it ends."""
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
        """Take the message of a receive that raises ``error`` instead: its pending send ends.

        A receive from any rank has no message of its own, and takes none.
        """
        if source is None or not self._is_open():
            return
        home = self._channel(source, self._engine.rank)
        operation = self._operation("recv", f"from rank {self._engine.ranks[source]}", tag, home, None, 0)
        home.loose[operation] = None
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
        is_standing: bool = False,
        take_body: TakeBody | None = None,
        kind: type[Operation] = Operation,
        call: type[MessageCall[Any]] = MessageCall,
    ) -> Call[T]:
        """Receive the next message from ``source`` (None: from any rank) into ``out``, or into a new array.

        ``is_object`` states whether it must be an object, ``is_standing`` that it may never come.  ``take_body``
        receives content that the sender has on a device, in an operation of ``kind`` that ``call`` runs; ``out`` then
        only gives its shape and dtype.
        """
        self._check_open("recv")
        home = self._engine.group if source is None else self._channel(source, self._engine.rank)
        place = "from any rank" if source is None else f"from rank {self._engine.ranks[source]}"
        operation = self._operation("recv", place, tag, home, None, 0, kind=kind)
        operation.is_standing = is_standing
        if not is_standing:
            self._record(operation, EventKind.RECEIVE, out, NO_PEER if source is None else self._engine.ranks[source])
        home.loose[operation] = None
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
            peer = self._engine.ranks[slot.source]
            if envelope.is_on_device and await (take_body or _decline)(operation, peer):
                return convert(ReceivedMessage(slot.source, array, is_object=False, has_been_taken=True))
            work = array if array.flags.c_contiguous else np.empty(array.shape, array.dtype)
            await receive_frame(operation, peer, STAGED if envelope.is_on_device else BODY, work)
            if work is not array:
                array[...] = work
            return convert(ReceivedMessage(slot.source, array, envelope.is_object))

        return call(operation, body, self._engine.count, gone=lambda: self._gone(request))

    def end_standing(self, operation: Operation, peer: int) -> None:
        """Turn a standing receive from rank ``peer`` of the world into an ordinary one.  Idempotent."""
        if operation.is_standing:
            operation.is_standing = False
            operation.started_at = operation.progress_at = self._table.now()
            self._record(operation, EventKind.RECEIVE, None, peer, is_called=False)
            self._table.waits.watch(operation)

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
            return self._table.links.memory.empty(envelope.shape, envelope.dtype)
        if (envelope.dtype, envelope.shape) != (out.dtype, out.shape):
            raise self._mismatch(slot, envelope, str(Envelope(out.dtype, out.shape, False)))
        return out

    def _mismatch(self, slot: _Slot, envelope: Envelope, mine: str) -> OperationMismatch:
        return OperationMismatch(
            f"rank {self._engine.ranks[slot.source]} sends {envelope} where "
            f"rank {self._table.links.rank} receives {mine} (tag {slot.tag})"
        )

    def _gone(self, request: _PendingReceive) -> PeerLost | None:
        """Return the reason why nothing can come for ``request``; None if something can.

        This rank has left, the source is gone, or, for a receive from any rank, one has failed or all have left.
        """
        lost, closed = self._table.links.lost, self._table.links.closed
        if request.filled.done() or not (lost or closed):
            return None
        if closed is not None:
            return closed
        if request.source is not None:
            return lost.get(self._engine.ranks[request.source])
        errors = [error for rank, error in lost.items() if rank in self._engine.others]
        failed = next((error for error in errors if error.cause != LEFT), None)
        return failed or (errors[0] if errors and len(errors) == len(self._engine.others) else None)

    # -- slots -----------------------------------------------------------------------------------------------------

    def _listen(self, request: _PendingReceive) -> None:
        """Ensure that there is a slot for every source from which ``request`` takes messages."""
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
        if operation.failure is not None:  # in a later turn: the next one may have failed too, and so on
            self._table.loop.call_soon(self._end_slot, slot, operation.failure)
            return
        try:
            future = operation.post(peer, ENVELOPE, memoryview(slot.envelope))
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
        """Notify the receiver of ``slot`` that its message will not come, or all waiting ones if its source is gone."""
        self._slots.pop((slot.source, slot.tag), None)
        slot.operation.discard()
        wanting = [
            request
            for request in self._requests
            if request.wants(slot.source, slot.tag) and not request.operation.is_over
        ]
        if isinstance(error, PeerLost):
            error = self._table.links.closed or error
            for request in wanting:
                may_come_of_others = request.source is None and not self._table.links.is_closing
                self._refuse(request, self._gone(request) if may_come_of_others else error)
            if self._engine.ranks[slot.source] not in self._table.links.lost:  # it is leaving, and has not left yet
                for request in wanting:
                    if request in self._requests:
                        self._listen(request)
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
        """Hand filled slots to the requests that have waited longest for them."""
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
        peer, operation = self._engine.ranks[slot.source], request.operation
        operation.bind(incoming.route, incoming.sequence, peer)
        self.end_standing(operation, peer)
        self._table.links.recorder.meet(
            operation.ticket,
            peer=peer,
            group=incoming.route.number,
            sequence=incoming.sequence,
            nbytes=decode_envelope(slot.envelope).nbytes,
        )
        request.slot = slot
        if request.refusal is not None:
            refuse(request.operation, request.refusal)
        elif not request.filled.done():
            request.filled.set_result(None)

    # -- making operations -----------------------------------------------------------------------------------------

    def _record(self, operation: Operation, kind: EventKind, x: object, peer: int, *, is_called: bool = True) -> None:
        """Record that a message of ``x`` begins; ``is_called``: the program called it, two frames up."""
        recorder, name = self._table.links.recorder, operation.name
        if isinstance(x, np.ndarray | Envelope) and len(recorder.words) < _NAMED_APART:
            name = f"{name}({x.dtype.name}[{','.join(map(str, x.shape))}])@direct"
        operation.ticket = recorder.begin(
            kind,
            recorder.name(name),
            state=EventState.CALLED if is_called else EventState.STARTED,
            peer=peer,
            group=operation.home.number,
            sequence=UNBOUND if kind is EventKind.RECEIVE else operation.sequence,
            nbytes=x.nbytes if isinstance(x, np.ndarray | UnwrittenPayload | Envelope) else 0,
            site=recorder.site(sys._getframe(3)) if is_called else 0,
        )

    def _channel(self, source: int, dest: int) -> Group:
        """Return the group in which messages from ``source`` to ``dest`` are numbered."""
        ranks = (self._engine.ranks[source], self._engine.ranks[dest])
        number = self._number(source, dest)
        channel = self._table.find(number)
        if channel is None:
            group = self._engine.group
            channel = Group(
                number=number,
                name=group.name,
                ranks=ranks,
                ledger=ChannelLedger(),
                limits=group.limits,
                ancestors=group.ancestors | {group.number},
            )
            self._table.add(channel)
            group.channels.append(number)
            self._table.links.recorder.add_group(
                GroupIdentity(number=number, name=group.name, ranks=ranks, parent=group.number)
            )
        return channel

    def _pairs(self) -> list[tuple[int, int]]:
        """Return the channels of this rank's messages, as pairs of source and destination."""
        me, others = self._engine.rank, range(self._engine.size)
        return [pair for other in others if other != me for pair in ((me, other), (other, me))]

    def _number(self, source: int, dest: int) -> int:
        ranks = self._engine.ranks
        return channel_number(self._engine.group.number, ranks[source], ranks[dest])

    def _operation(
        self,
        name: str,
        place: str,
        tag: int,
        home: Group,
        route: Group | None,
        sequence: int,
        *,
        kind: type[Operation] = Operation,
    ) -> Operation:
        number = "" if route is None else f" #{sequence & ((1 << TAG_SHIFT) - 1)}"
        me = self._table.links.rank
        return kind(
            context=self._table.context,
            home=home,
            route=route,
            sequence=sequence,
            description=_DESCRIPTION,
            name=name,
            label=f"{name}{number} {place} (tag {tag})",
            audience=() if route is None else tuple(rank for rank in route.ranks if rank != me),
        )


async def transmit(operation: Operation, peer: int, frames: Mapping[int, memoryview]) -> None:
    """Send ``frames`` of one message and wait until their memory may be reused."""
    sendings = [operation.send(peer, frame, content) for frame, content in frames.items()]
    for sending in sendings:
        if sending is not None:
            await operation.sent(peer, sending)


async def receive_frame(operation: Operation, peer: int, frame: int, into: Array) -> None:
    """Receive one frame of a message into the contiguous array ``into``."""
    future = operation.post(peer, frame, into.reshape(-1).view(np.uint8).data)
    if future is not None:
        await operation.received(peer, frame, future)


async def _decline(operation: Operation, peer: int) -> bool:
    """Ask the sender for the content of a device array through host memory."""
    await transmit(operation, peer, {ANSWER: memoryview(DECLINED)})
    return False


def _ledger(channel: Group) -> ChannelLedger:
    assert isinstance(channel.ledger, ChannelLedger)
    return channel.ledger
