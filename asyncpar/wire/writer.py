"""Frames to bytes: what waits for the channel, oldest first, without copying payloads.

The writer lends slices of headers and payloads (``segments``) and is told how much of them the channel took
(``advance``).  A payload's owner may have it back at any time (``release``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from asyncpar.wire.segments import Payload, Segments, views_of

_NOTHING = memoryview(b"")
_MAX_SEGMENTS = 256


class OutgoingFrame:
    """One frame that waits, or is partly written."""

    __slots__ = ("has_begun", "head", "is_dropped", "is_released", "payload", "written")

    def __init__(self, head: memoryview, payload: Payload, written: Callable[[], None] | None) -> None:
        self.head = head
        self.payload = payload
        self.written = written
        self.has_begun = False
        self.is_released = False
        self.is_dropped = False


class FrameWriter:
    """The queue of frames in front of one channel.  Sans-I/O."""

    def __init__(self) -> None:
        self._frames: deque[OutgoingFrame] = deque()
        self.waiting_bytes = 0
        """Bytes pushed, neither taken by the channel nor dropped yet."""

    def __bool__(self) -> bool:
        """Is anything waiting?"""
        return self.waiting_bytes > 0

    def push(
        self,
        head: bytes | bytearray | memoryview,
        payload: bytes | bytearray | Payload,
        *,
        taken: int = 0,
        written: Callable[[], None] | None = None,
    ) -> OutgoingFrame:
        """Queue a frame of which the channel has already taken ``taken`` bytes, but not all.

        ``written`` is called when the channel has taken its last byte, unless it was released.
        """
        if not self.waiting_bytes:
            self._frames.clear()  # of frames that were dropped
        if not isinstance(payload, Segments):
            payload = memoryview(payload)
        frame = OutgoingFrame(memoryview(head), payload, written)
        self.waiting_bytes += len(frame.head) + len(frame.payload)
        self._frames.append(frame)
        if taken:
            assert len(self._frames) == 1, "only the first frame of the queue may have begun"
            self.advance(taken)
        return frame

    def segments(self, limit: int) -> list[memoryview]:
        """Return the bytes that must go next, about ``limit`` of them at most; empty when nothing waits."""
        segments: list[memoryview] = []
        for frame in self._frames:
            for part in (frame.head, *views_of(frame.payload)):
                if len(part) and limit > 0 and len(segments) < _MAX_SEGMENTS:
                    segments.append(part[:limit])
                    limit -= len(segments[-1])
            if limit <= 0 or len(segments) >= _MAX_SEGMENTS:
                break
        return segments

    def advance(self, count: int) -> None:
        """The channel took ``count`` bytes of ``segments``."""
        self.waiting_bytes -= count
        while self._frames:
            frame = self._frames[0]
            if count:
                frame.has_begun = True
            of_head = min(count, len(frame.head))
            frame.head = frame.head[of_head:]
            of_payload = min(count - of_head, len(frame.payload))
            frame.payload = frame.payload[of_payload:]
            count -= of_head + of_payload
            if frame.head or frame.payload:
                return
            self._frames.popleft()
            frame.payload = _NOTHING
            if frame.written is not None and not frame.is_released:
                frame.written()

    def release(self, frame: OutgoingFrame) -> bool:
        """Give back the payload's memory before this returns; True if the frame still goes out, whole.

        A frame that has begun goes on from a copy of its rest; one that has not is dropped.
        """
        frame.is_released = True
        if frame.is_dropped:
            return False
        if frame.has_begun:
            self.keep(frame)
            return True
        if frame.head:
            self.waiting_bytes -= len(frame.head) + len(frame.payload)
            frame.head = frame.payload = _NOTHING
            frame.is_dropped = True
            return False
        return True

    def keep(self, frame: OutgoingFrame) -> None:
        """Give back the payload's memory before this returns; the frame goes out in any case, from a copy."""
        frame.is_released = True
        frame.payload = memoryview(bytes(frame.payload))

    def clear(self) -> None:
        """Drop everything and give all payloads back."""
        for frame in self._frames:
            frame.head = frame.payload = _NOTHING
            frame.is_dropped = True
        self._frames.clear()
        self.waiting_bytes = 0
