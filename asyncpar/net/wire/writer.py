"""Conversion of frames to bytes: a queue for the channel, oldest first, without copying payloads.

The writer lends slices of headers and payloads (``segments``) and is notified how much of them the channel took
(``advance``).  A payload's owner may reclaim it at any time (``release``).  The checksum of a payload is computed as
its bytes are lent, when the channel is about to read them anyway, and lent behind them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from asyncpar.net.wire.frame import TAIL_BYTES, Payload, PayloadChecksum, Segments, views_of

_NOTHING = memoryview(b"")
_MAX_SEGMENTS = 256


class OutgoingFrame:
    """One frame that is waiting or partly written."""

    __slots__ = (
        "checksum",
        "has_begun",
        "head",
        "is_dropped",
        "is_released",
        "payload",
        "tail_left",
        "void",
        "written",
    )

    def __init__(
        self,
        head: memoryview,
        payload: Payload,
        written: Callable[[], None] | None,
        checksum: PayloadChecksum | None,
        void: Callable[[], bytes] | None,
    ) -> None:
        self.head = head
        self.payload = payload
        self.written = written
        self.checksum = checksum
        self.void = void
        self.tail_left = 0 if checksum is None else TAIL_BYTES
        self.has_begun = False
        self.is_released = False
        self.is_dropped = False

    def __len__(self) -> int:
        """Return the number of bytes that the channel has not taken."""
        return len(self.head) + len(self.payload) + self.tail_left

    def lend(self, segments: list[memoryview], limit: int) -> int:
        """Append the next bytes to send, at most ``limit`` of them; return the rest of the limit."""
        limit = _lend(segments, self.head, limit)
        before = limit
        for view in views_of(self.payload):
            limit = _lend(segments, view, limit)
        if self.checksum is not None:
            lent = before - limit
            self.checksum.cover(self.payload, lent)
            if lent == len(self.payload):
                limit = _lend(segments, memoryview(self.checksum.tail())[-self.tail_left :], limit)
        return limit

    def take(self, count: int) -> int:
        """Record that the channel took ``count`` bytes; return how many of them belong to later frames."""
        if count:
            self.has_begun = True
        of_head = min(count, len(self.head))
        self.head = self.head[of_head:]
        of_payload = min(count - of_head, len(self.payload))
        self.payload = self.payload[of_payload:]
        if self.checksum is not None:
            self.checksum.covered -= of_payload
        of_tail = min(count - of_head - of_payload, self.tail_left)
        self.tail_left -= of_tail
        return count - of_head - of_payload - of_tail

    def drop(self) -> None:
        """Release all memory."""
        self.head = self.payload = _NOTHING
        self.checksum = None
        self.tail_left = 0
        self.is_dropped = True


class FrameWriter:
    """The queue of frames in front of one channel.  Sans-I/O."""

    def __init__(self) -> None:
        self._frames: deque[OutgoingFrame] = deque()
        self.waiting_bytes = 0
        """Bytes pushed, neither taken by the channel nor dropped yet."""

    def __bool__(self) -> bool:
        """Return whether anything is waiting."""
        return self.waiting_bytes > 0

    def push(
        self,
        head: bytes | bytearray | memoryview,
        payload: bytes | bytearray | Payload,
        *,
        taken: int = 0,
        written: Callable[[], None] | None = None,
        checksum: PayloadChecksum | None = None,
        void: Callable[[], bytes] | None = None,
    ) -> OutgoingFrame:
        """Queue a frame of which the channel has already taken ``taken`` bytes, but not all.

        ``written`` is called when the channel has taken its last byte, unless it was released.  ``checksum`` follows
        the payload.  ``void`` returns the bytes to send in place of a frame that is dropped (None: nothing).
        """
        if not self.waiting_bytes:
            self._frames.clear()  # remnants of dropped frames
        if not isinstance(payload, Segments):
            payload = memoryview(payload)
        frame = OutgoingFrame(memoryview(head), payload, written, checksum, void)
        self.waiting_bytes += len(frame)
        self._frames.append(frame)
        if taken:
            assert len(self._frames) == 1, "only the first frame of the queue may have begun"
            self.advance(taken)
        return frame

    def segments(self, limit: int) -> list[memoryview]:
        """Return the next bytes to send, about ``limit`` of them at most; empty if nothing waits."""
        segments: list[memoryview] = []
        for frame in self._frames:
            limit = frame.lend(segments, limit)
            if limit <= 0 or len(segments) >= _MAX_SEGMENTS:
                break
        return segments

    def advance(self, count: int) -> None:
        """Record that the channel took ``count`` bytes of ``segments``."""
        self.waiting_bytes -= count
        while self._frames:
            frame = self._frames[0]
            count = frame.take(count)
            if len(frame):
                return
            self._frames.popleft()
            frame.payload = _NOTHING
            if frame.written is not None and not frame.is_released:
                frame.written()

    def release(self, frame: OutgoingFrame) -> bool:
        """Release the payload's memory before this returns; return True if the frame is still sent, whole.

        A frame that has begun continues from a copy of its rest; one that has not is dropped.
        """
        frame.is_released = True
        if frame.is_dropped:
            return False
        if frame.has_begun:
            self.keep(frame)
            return True
        if frame.head:
            self._drop(frame)
            return False
        return True

    def keep(self, frame: OutgoingFrame) -> None:
        """Release the payload's memory before this returns; the frame is sent in any case, from a copy."""
        frame.is_released = True
        frame.payload = memoryview(bytes(frame.payload))

    def clear(self) -> None:
        """Drop everything and release all payloads."""
        for frame in self._frames:
            frame.drop()
        self._frames.clear()
        self.waiting_bytes = 0

    def _drop(self, frame: OutgoingFrame) -> None:
        """Release the payload of a frame that has not begun; its replacement stays in the queue."""
        self.waiting_bytes -= len(frame)
        instead = b"" if frame.void is None else frame.void()
        frame.drop()
        frame.head = memoryview(instead)
        self.waiting_bytes += len(frame)


def _lend(segments: list[memoryview], part: memoryview, limit: int) -> int:
    """Append as much of ``part`` as ``limit`` and the room in ``segments`` allow; return the rest of the limit."""
    if len(part) and limit > 0 and len(segments) < _MAX_SEGMENTS:
        segments.append(part[:limit])
        limit -= len(segments[-1])
    return limit
