"""The message lane: frames over any channel of messages, such as MPI's.

Frames are packed into messages of limited length; frames that wait together are sent together.  Bytes are copied into a
message on one side and out of it on the other, piece by piece within the cache.  Passing the user's memory to the
channel instead would save that, but such a channel does not release memory before it has finished with it, for which it
may need a peer that hangs; and the caller of a cancelled operation gets its array back at once.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from asyncpar.errors import PeerLost, ProtocolError
from asyncpar.net.transport.lane import MAX_FRAME_BYTES, Lane, LaneEvents, Sending
from asyncpar.net.transport.links import Connector, Links
from asyncpar.net.transport.queue import SendQueue
from asyncpar.net.wire.frame import HEADER_BYTES, FrameHeader, Payload, WholeSink, encode_header, views_of
from asyncpar.net.wire.reader import FrameReader


class Receiver(Protocol):
    """The callbacks of a channel: on the event loop, without blocking, none before ``MessageChannel.open``."""

    def arrived(self, message: memoryview) -> None:
        """Handle a message, which arrives in order; its memory is valid during the call."""
        ...

    def ended(self) -> None:
        """Handle ``MessageChannel.end`` of the other side; nothing more arrives."""
        ...

    def has_room(self) -> None:
        """Handle the departure of a posted message: there may be room for another."""
        ...

    def broke(self, cause: str) -> None:
        """Handle the end of the channel in both directions."""
        ...


class MessageChannel(ABC):
    """Carries messages of bytes to and from one peer, in order, each exactly once."""

    message_bytes: int
    """Limit of bytes in a message."""

    @property
    @abstractmethod
    def is_full(self) -> bool:
        """Whether the number of messages in flight is at its limit."""

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether all posted messages have left."""

    @abstractmethod
    def open(self, receiver: Receiver) -> None:
        """Start delivering; messages that arrived before are delivered at once."""

    @abstractmethod
    def post(self, segments: Sequence[bytes | memoryview]) -> None:
        """Copy ``segments`` and send them as one message, of 1 to ``message_bytes``; only while it is not full."""

    @abstractmethod
    def end(self) -> None:
        """Notify the other side, after all posted messages, that nothing more comes.  Idempotent."""

    @abstractmethod
    def stop(self) -> None:
        """Deliver nothing more; messages that arrive are dropped.  Idempotent."""


class ProgressEngine(ABC):
    """The channels of one rank to all others, and the driver of their progress."""

    @abstractmethod
    def open(self, *, meet: Callable[[int], None], leave: Callable[[int], None]) -> None:
        """Start receiving.

        ``meet`` is called with a rank whose first message arrives before its channel was requested, or ``leave`` if
        that is the end of its messages.
        """

    @abstractmethod
    def channel(self, rank: int) -> MessageChannel:
        """Return the channel to ``rank``, always the same."""

    @abstractmethod
    async def close(self) -> None:
        """Notify all ranks that this one ends, wait until all have (at most a second), and stop receiving."""


class MessageConnector(Connector):
    """Links ranks by message lanes.  Nothing is dialed: the first message links both."""

    def __init__(self, engine: ProgressEngine, *, kind: str) -> None:
        self._engine = engine
        self._kind = kind
        self._links: Links | None = None

    def join(self, links: Links) -> None:
        """Start carrying the frames of ``links``."""
        self._links = links
        self._engine.open(meet=self._meet, leave=links.report_left)

    async def connect(self, links: Links, rank: int) -> None:
        if not links.is_up(rank):
            links.adopt(rank, MessageLane(self._engine.channel(rank), kind=self._kind))

    def default_lane(self, rank: int) -> str:  # noqa: ARG002
        return self._kind

    def _meet(self, rank: int) -> None:
        assert self._links is not None
        self._links.adopt(rank, MessageLane(self._engine.channel(rank), kind=self._kind))


FLUSH_SECONDS = 1.0
_MAX_SEGMENTS = 256


class MessageLane(Lane):
    """A lane over ``channel``, which it owns."""

    def __init__(self, channel: MessageChannel, *, kind: str) -> None:
        self.kind = kind
        self._channel = channel
        self._limit = channel.message_bytes
        self._queue = SendQueue()
        self._writer = self._queue.writer
        self._reader: FrameReader | None = None
        self._events: LaneEvents | None = None
        self._is_open = True
        self._is_closing = False
        self._has_peer_ended = False
        self._through: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # -- Lane --------------------------------------------------------------------------------------------------------

    def start(self, events: LaneEvents) -> None:
        self._events = events
        accept = events.accept if isinstance(events, WholeSink) else None
        self._reader = FrameReader(events, max_length=MAX_FRAME_BYTES, accept=accept)
        self._channel.open(self)

    def send(self, header: FrameHeader, payload: Payload) -> Sending | None:
        if not self._is_open or self._is_closing:
            return None
        head, views = encode_header(header), views_of(payload)
        size = HEADER_BYTES + len(payload)
        self._bytes_sent += size
        if not self._writer and not self._channel.is_full and size <= self._limit and len(views) < _MAX_SEGMENTS:
            self._channel.post([head, *views])
            return None
        sending = self._queue.push(header, head, payload)
        self._post_waiting()
        if self._queue.is_overfull:
            self._lose("the peer does not read: too many small frames wait for it")
        return None if sending is None or sending.is_through else sending

    def divert(self) -> None:
        if self._reader is not None:
            self._reader.divert()

    def abort(self, error: PeerLost) -> None:
        if self._is_open:
            self._shut()
            self._queue.fail(error)

    async def close(self) -> None:
        if not self._is_open or self._is_closing:
            return
        self._is_closing = True
        self._events = None
        if self._reader is None:
            self._channel.open(self)
        else:
            self._reader.stop()
        self._post_waiting()
        try:
            await asyncio.wait({self._through}, timeout=FLUSH_SECONDS)
        finally:
            self.abort(PeerLost("the lane was closed before this was sent", cause="closed"))

    # -- Receiver ----------------------------------------------------------------------------------------------------

    def arrived(self, message: memoryview) -> None:
        if self._events is None or self._reader is None:
            return
        self._bytes_received += len(message)
        try:
            self._reader.feed(message)
        except ProtocolError as error:
            self._lose(f"protocol error: {error}")

    def ended(self) -> None:
        self._has_peer_ended = True
        if self._is_closing:
            self._post_waiting()
        elif self._reader is not None and not self._reader.is_between_frames:
            self._lose("the peer closed the channel in the middle of a frame")
        else:
            self._lose("the peer closed the channel")

    def has_room(self) -> None:
        if self._is_open:
            self._post_waiting()

    def broke(self, cause: str) -> None:
        self._lose(cause)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _post_waiting(self) -> None:
        """Post as much as there is room for; when closing, check whether that was all."""
        while self._writer and not self._channel.is_full:
            segments = self._writer.segments(self._limit)
            self._channel.post(segments)
            self._writer.advance(sum(map(len, segments)))
        if self._is_closing and not self._writer:
            self._channel.end()
            if self._channel.is_idle and self._has_peer_ended and not self._through.done():
                self._through.set_result(None)

    def _lose(self, cause: str) -> None:
        """Notify the owner, once, that the channel has ended."""
        if not self._is_open:
            return
        events = self._events
        self._shut()
        self._queue.fail(PeerLost(cause, cause=cause) if events is None else events.lost(cause))

    def _shut(self) -> None:
        self._is_open = False
        self._events = None
        if self._reader is not None:
            self._reader.stop()
        self._channel.end()
        self._channel.stop()
        if not self._through.done():
            self._through.set_result(None)
