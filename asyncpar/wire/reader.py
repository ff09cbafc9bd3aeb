"""Bytes to frames, without copying what is large.

Theory of operation.  The reader says where the next bytes must land (``buffer``) and is told how many did
(``advance``).  While headers and small payloads are expected that is a staging area, so that one read may bring many
frames; small payloads are copied out of it.  Once the header of a large payload is known, what the sink lends for it is
handed out directly, and the bytes land where they are wanted.  A payload that nobody wants runs through the staging
area, which is all the memory that the reader ever owns.

A sink that is not ready holds the reader (``hold``): then what has been read stays in the staging area until
``resume``, and whoever reads from the channel must stop doing so meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from asyncpar.errors import ProtocolError
from asyncpar.wire.header import HEADER_BYTES, FrameHeader, decode_header
from asyncpar.wire.sink import FrameSink

T = TypeVar("T")

STAGING_BYTES = 64 * 1024
"""Size of the staging area."""

DIRECT_BYTES = 8 * 1024
"""When at least this much of a payload is missing, it is read straight into the sink's memory."""


class FrameReader:
    """Cut a stream of bytes into frames for ``sink``.  Sans-I/O; not re-entrant.

    Whatever the bytes are, the only exception of its own is ``ProtocolError``; what the sink raises passes through.
    After either, and after ``stop``, all further bytes are ignored.

    ``accept`` is offered small frames that are there as a whole (see ``WholeSink``).
    ``share`` says how many bytes of a payload come over this channel (default: all); ``ended`` is called behind every
    frame, also a dropped one.
    """

    def __init__(
        self,
        sink: FrameSink,
        *,
        max_length: int,
        share: Callable[[FrameHeader], int] | None = None,
        ended: Callable[[FrameHeader], None] | None = None,
        accept: Callable[[FrameHeader, memoryview], bool] | None = None,
    ) -> None:
        self._sink = sink
        self._max_length = max_length
        self._share = share
        self._ended = ended
        self._accept = accept
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._staged = 0
        self._header: FrameHeader | None = None
        self._target: memoryview | None = None
        self._missing = 0
        self._is_direct = False
        self._is_stopped = False
        self.is_held = False

    @property
    def is_between_frames(self) -> bool:
        """Has every frame that began also ended?  A stream that ends elsewhere was cut."""
        return self._header is None and self._staged == 0

    def buffer(self) -> memoryview:
        """Return where the next bytes must land; never empty.  Valid until ``advance`` or ``divert``."""
        self._is_direct = self._target is not None and self._missing >= DIRECT_BYTES and not self._is_stopped
        if self._is_direct:
            assert self._target is not None
            return self._target[len(self._target) - self._missing :]
        return self._staging[self._staged :]

    def advance(self, count: int) -> None:
        """Take the first ``count`` bytes of what ``buffer`` returned last."""
        if self._is_stopped:
            return
        if self._is_direct:
            self._missing -= count
            if self._missing == 0:
                self._guarded(self._end_frame)
            return
        end = self._staged + count
        self._staged = 0
        self._guarded(lambda: self._parse_staged(end))

    def feed(self, data: bytes | bytearray | memoryview) -> memoryview:
        """Take ``data``, for channels that hand out bytes of their own.  Nothing of it is kept.

        Returns what is left of it, which is nothing unless the reader is held: give that again after ``resume``.
        """
        view = memoryview(data)
        return view[len(view) :] if self._is_stopped else self._guarded(lambda: self._feed(view))

    def divert(self) -> None:
        """Forget the memory lent for the frame that is arriving; its other bytes are dropped.  Else do nothing."""
        self._target = None

    def hold(self) -> None:
        """Take no further frame for now.  Inside ``lend``: nor this one, which will be lent for again."""
        self.is_held = True

    def resume(self) -> bool:
        """Go on after ``hold``, first with what has been read already; False if that ended in being held again."""
        self.is_held = False
        end, self._staged = self._staged, 0
        if end and not self._is_stopped:
            self._guarded(lambda: self._parse_staged(end))
        return not self.is_held

    def stop(self) -> None:
        """Deliver nothing more and forget all lent memory."""
        self._is_stopped = True
        self._target = None

    def check_end(self) -> None:
        """The stream is over.  Raises ``ProtocolError`` if that cuts a frame."""
        if not self.is_between_frames and not self._is_stopped:
            raise ProtocolError("the stream ended in the middle of a frame")

    # -- inside ----------------------------------------------------------------------------------------------------

    def _guarded(self, step: Callable[[], T]) -> T:
        try:
            return step()
        except BaseException:
            self.stop()
            raise

    def _feed(self, view: memoryview) -> memoryview:
        if self._staged:
            taken = min(HEADER_BYTES - self._staged, len(view))
            self._staging[self._staged : self._staged + taken] = view[:taken]
            self._staged += taken
            view = view[taken:]
            if self._staged < HEADER_BYTES:
                return view
            self._staged = 0
            if not self._begin_frame(decode_header(self._staging, max_length=self._max_length)):
                self._staged = HEADER_BYTES
                return view
        rest = view[self._parse(view) :]
        if not self.is_held:
            self._staging[: len(rest)] = rest
            self._staged = len(rest)
            rest = rest[len(rest) :]
        return rest

    def _parse_staged(self, end: int) -> None:
        """Take the first ``end`` bytes of the staging area; what is left of them moves to its front."""
        taken = self._parse(self._staging[:end])
        self._staged = end - taken
        self._staging[: self._staged] = bytes(self._staging[taken:end])

    def _parse(self, view: memoryview) -> int:
        """Take as much of ``view`` as can be taken now: all but the beginning of a header, unless the reader is held.

        Return how much that was.
        """
        position, end = 0, len(view)
        while position < end and not self.is_held:
            if self._is_stopped:
                return end
            if self._header is not None:
                position += self._take(view, position)
            elif end - position < HEADER_BYTES:
                break
            else:
                header = decode_header(view, max_length=self._max_length, offset=position)
                start = position + HEADER_BYTES
                stop = start + header.length
                if self._accept is not None and stop <= end and self._accept(header, view[start:stop]):
                    position = stop
                elif self._begin_frame(header):
                    position = start
        return position

    def _begin_frame(self, header: FrameHeader) -> bool:
        """Take a header; False if its frame must wait."""
        target = self._sink.lend(header)
        if self._is_stopped:
            return True
        if self.is_held:
            return False
        length = header.length if self._share is None else self._share(header)
        assert target is None or len(target) == length, f"{len(target)} bytes were lent for {header}"
        self._header = header
        self._target = target
        self._missing = length
        if length == 0:
            self._end_frame()
        return True

    def _take(self, view: memoryview, position: int) -> int:
        """Move payload bytes out of ``view`` and return how many."""
        taken = min(self._missing, len(view) - position)
        if self._target is not None:
            start = len(self._target) - self._missing
            self._target[start : start + taken] = view[position : position + taken]
        self._missing -= taken
        if self._missing == 0:
            self._end_frame()
        return taken

    def _end_frame(self) -> None:
        header, self._header = self._header, None
        target, self._target = self._target, None
        assert header is not None
        if target is not None:
            self._sink.landed(header)
        if self._ended is not None and not self._is_stopped:
            self._ended(header)
