"""The receiving side of a real link, in a state in which every kind of frame means something."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterable

from asyncpar.collectives.protocol import Abort, Probe, Status, decode_control, describe, encode_control
from asyncpar.errors import PeerLost
from asyncpar.net.transport.flow_control import EAGER_WINDOW
from asyncpar.net.transport.lane import MAX_FRAME_BYTES, Lane, LaneEvents, Sending
from asyncpar.net.transport.link import Link
from asyncpar.net.wire.frame import HEADER_BYTES, MESSAGE_GROUP, FrameHeader, FrameKind, Key, Payload, encode_header
from asyncpar.net.wire.reader import FrameReader

GENERATION = 3
FINGERPRINT = 0x5A5A5A5A
PAYLOAD = bytes(range(1, 49))
MESSAGE_BYTES = 1 << 20
STALE_GROUP = 9
POSTED, EARLY, STALE = Key(7, 1, 0), Key(7, 2, 0), Key(STALE_GROUP, 1, 0)
UNSENT = Key(8, 1, 0)
MESSAGE, LATER_MESSAGE = Key(MESSAGE_GROUP, 0, 0), Key(MESSAGE_GROUP, 1, 0)

_DESCRIPTION = describe("all_reduce", ("float32[8]", "sum"), "ring")


class SilentLane(Lane):
    """Takes frames and forgets them; counts what it took."""

    kind = "tcp"
    bytes_sent = bytes_received = 0

    def __init__(self) -> None:
        self.kinds: list[FrameKind] = []

    def start(self, events: LaneEvents) -> None: ...

    def send(self, header: FrameHeader, payload: Payload) -> Sending | None:
        assert header.length == len(payload)
        self.kinds.append(header.kind)
        return None

    def divert(self) -> None: ...

    def abort(self, error: PeerLost) -> None: ...

    async def close(self) -> None: ...


class Victim:
    """A link with a receive posted for ``POSTED`` and a send of ``UNSENT`` that waits for its grant.

    Control frames are decoded as collectives do; what is delivered is written down.  Make it on a running loop.
    """

    def __init__(self) -> None:
        self.buffer = bytearray(len(PAYLOAD))
        self.messages: list[bytes] = []
        self.controls: list[FrameKind] = []
        self.lane = SilentLane()
        self.fed = 0
        self.link = Link(
            peer=1,
            generation=GENERATION,
            referee=self,
            on_control=self._control,
            on_lost=lambda rank, cause: PeerLost(cause, rank=rank),
            on_message=self._message,
            max_message_bytes=MESSAGE_BYTES,
            message_budget=MESSAGE_BYTES,
        )
        self.link.attach(self.lane)
        self.received = self.link.post(POSTED, FINGERPRINT, memoryview(self.buffer))
        self.link.send(Key(8, 2, 0), FINGERPRINT, memoryview(bytes(500)))  # so that there is credit to give back
        self.unsent = self.link.send(UNSENT, FINGERPRINT, memoryview(bytes(100_000)))
        self.reader = self.new_reader()

    @property
    def early_bytes(self) -> int:
        """Bytes of payloads that wait for a receive."""
        return self.link._inbox.early_bytes  # noqa: SLF001  # a link tells nobody how much it keeps; the budget under attack is the inbox's

    def new_reader(self) -> FrameReader:
        """Return a reader of a fresh stream into the same link."""
        return FrameReader(self.link, max_length=MAX_FRAME_BYTES)

    def feed(self, content: bytes) -> None:
        """Take ``content``; none of it may be left over."""
        assert len(self.reader.feed(content)) == 0
        assert self.early_bytes <= EAGER_WINDOW

    def feed_all(self, frames: Iterable[bytes]) -> None:
        """Take frame after frame, and count them."""
        for content in frames:
            self.feed(content)
            self.fed += 1

    def is_stale(self, group: int, sequence: int) -> bool:
        return group == STALE_GROUP

    def mismatch(self, header: FrameHeader) -> None: ...

    def _control(self, rank: int, header: FrameHeader, payload: bytes) -> None:
        self.controls.append(header.kind)
        match header.kind:
            case FrameKind.ABORT:
                decode_control(payload, Abort)
            case FrameKind.PROBE:
                decode_control(payload, Probe)
            case FrameKind.STATUS:
                decode_control(payload, Status)

    def _message(self, payload: memoryview, release: Callable[[], None]) -> None:
        self.messages.append(bytes(payload))
        release()


def frame(
    kind: FrameKind, key: Key, payload: bytes = PAYLOAD, *, fingerprint: int = FINGERPRINT, generation: int = GENERATION
) -> bytes:
    """Return the bytes of one frame."""
    return encode_header(FrameHeader(kind, generation, *key, fingerprint, len(payload))) + payload


def number(value: int) -> bytes:
    """Return the payload of a frame that carries a length."""
    return struct.pack("<Q", value)


def every_frame() -> dict[str, bytes]:
    """Return a valid frame of each kind, and of each way on which a ``Victim`` takes it."""
    return {
        "eager, posted": frame(FrameKind.EAGER, POSTED),
        "eager, early": frame(FrameKind.EAGER, EARLY),
        "eager, stale": frame(FrameKind.EAGER, STALE),
        "eager message": frame(FrameKind.EAGER, MESSAGE, fingerprint=0),
        "bulk": frame(FrameKind.BULK, POSTED),
        "bulk, unknown": frame(FrameKind.BULK, EARLY),
        "request": frame(FrameKind.REQUEST, POSTED, number(len(PAYLOAD))),
        "request, early": frame(FrameKind.REQUEST, EARLY, number(len(PAYLOAD))),
        "request of a message": frame(FrameKind.REQUEST, MESSAGE, number(100_000), fingerprint=0),
        "message taken back": frame(FrameKind.REQUEST, MESSAGE, number(0), fingerprint=1),
        "grant": frame(FrameKind.GRANT, UNSENT, number(100_000)),
        "grant, early": frame(FrameKind.GRANT, EARLY, number(100_000)),
        "credit": frame(FrameKind.CREDIT, Key(0, 0, 0), number(500 + HEADER_BYTES), fingerprint=0),
        "abort": frame(FrameKind.ABORT, POSTED, encode_control(Abort("mismatch", "text", _DESCRIPTION, rank=1))),
        "probe": frame(FrameKind.PROBE, POSTED, encode_control(Probe(_DESCRIPTION))),
        "status": frame(FrameKind.STATUS, POSTED, encode_control(Status("in all_reduce #1"))),
        "notice": frame(FrameKind.NOTICE, Key(0, 1, 0), b"gone"),
        "goodbye": frame(FrameKind.GOODBYE, Key(0, 0, 0), b""),
        "striped": frame(FrameKind.STRIPED, POSTED),
    }


def drop(*futures: asyncio.Future[None] | None) -> None:
    """Forget futures whose errors nobody will look at."""
    for future in futures:
        if future is not None and not future.cancel() and not future.cancelled():
            future.exception()
