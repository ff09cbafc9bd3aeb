"""Conversion of bytes to frames, without copying large payloads.

Theory of operation.  The reader provides the memory for the next bytes (``buffer``) and is notified how many arrived
(``advance``).  While headers and small payloads are expected, that is a staging area, so that one read may bring many
frames; small payloads are copied out of it.  Once the header of a large payload is known, the memory lent by the sink
is handed out directly, and the bytes are read straight into it.  A payload that the sink drops passes through the
staging area, which is all the memory that the reader ever owns.

A sink that is not ready holds the reader (``hold``): then the bytes already read stay in the staging area until
``resume``, and reading from the channel must stop meanwhile.

Checksums (see ``frame``) are computed on the bytes that have just arrived, and a frame whose payload is damaged is
never delivered.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncpar.errors import ProtocolError
from asyncpar.net.wire.frame import (
    HEADER_BYTES,
    SEAL_BYTES,
    FrameHeader,
    FrameKind,
    FrameSink,
    FrameVerifier,
    decode_header,
)

STAGING_BYTES = 64 * 1024
"""Size of the staging area."""

DIRECT_BYTES = 8 * 1024
"""If at least this much of a payload is missing, it is read straight into the sink's memory."""

_OF_THE_CONNECTION = frozenset({FrameKind.VOID, FrameKind.POSITION})


class FrameReader:
    """Cuts a stream of bytes into frames for ``sink``.  Sans-I/O; not re-entrant.

    Whatever the bytes are, the only exception of its own is ``ProtocolError``; exceptions of the sink pass through.
    After either, and after ``stop``, all further bytes are ignored.

    ``accept`` is offered small frames that have arrived completely (see ``WholeSink``).  ``share`` returns the number
    of payload bytes that come over this channel (default: all); ``ended`` is called after every frame, even a dropped
    one.  ``verifier`` checks sealed frames (default: frames are not sealed).  ``on_position`` receives the values of
    POSITION frames.
    """

    def __init__(
        self,
        sink: FrameSink,
        *,
        max_length: int,
        share: Callable[[FrameHeader], int] | None = None,
        ended: Callable[[FrameHeader], None] | None = None,
        accept: Callable[[FrameHeader, memoryview], bool] | None = None,
        verifier: FrameVerifier | None = None,
        on_position: Callable[[int], None] | None = None,
    ) -> None:
        self._sink = sink
        self._max_length = max_length
        self._share = share
        self._ended = ended
        self._accept = accept
        self._verifier = verifier
        self._on_position = on_position
        self._head_bytes = HEADER_BYTES if verifier is None else HEADER_BYTES + SEAL_BYTES
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._staged = 0
        self._header: FrameHeader | None = None
        self._target: memoryview | None = None
        self._missing = 0
        self._tail = 0
        """Number of bytes that follow the payload of the arriving frame."""
        self._is_direct = False
        self._is_stopped = False
        self.is_held = False

    @property
    def is_between_frames(self) -> bool:
        """Whether every frame that began has also ended; a stream that ends elsewhere was cut."""
        return self._header is None and self._staged == 0

    @property
    def missing_bytes(self) -> int:
        """Bytes still missing from the arriving payload; 0 between frames."""
        return 0 if self._header is None else self._missing

    def buffer(self) -> memoryview:
        """Return the memory for the next bytes; never empty.  Valid until ``advance`` or ``divert``."""
        self._is_direct = self._target is not None and self._missing >= DIRECT_BYTES and not self._is_stopped
        if self._is_direct:
            assert self._target is not None
            return self._target[len(self._target) - self._missing :]
        return self._staging[self._staged :]

    def advance(self, count: int) -> None:
        """Process the first ``count`` bytes of the last ``buffer``."""
        if self._is_stopped:
            return
        try:
            if self._is_direct:
                self._landed_directly(count)
            else:
                end, self._staged = self._staged + count, 0
                self._parse_staged(end)
        except BaseException:
            self.stop()
            raise

    def feed(self, data: bytes | bytearray | memoryview) -> memoryview:
        """Process ``data``, for channels that hand out bytes of their own.  No reference to it is kept.

        Returns the rest of it, which is empty unless the reader is held: pass that again after ``resume``.
        """
        view = memoryview(data)
        if self._is_stopped:
            return view[len(view) :]
        try:
            return self._feed(view)
        except BaseException:
            self.stop()
            raise

    def divert(self) -> None:
        """Stop writing to the memory lent for the arriving frame; drop its other bytes.  Otherwise do nothing."""
        self._target = None

    def hold(self) -> None:
        """Process no further frame for now.  Inside ``lend``: nor this one, for which ``lend`` will be called again."""
        self.is_held = True

    def resume(self) -> bool:
        """Resume after ``hold``, first with bytes already read; return False if that ended in being held again."""
        self.is_held = False
        end, self._staged = self._staged, 0
        if end and not self._is_stopped:
            try:
                self._parse_staged(end)
            except BaseException:
                self.stop()
                raise
        return not self.is_held

    def stop(self) -> None:
        """Deliver nothing more and drop all lent memory."""
        self._is_stopped = True
        self._target = None

    def check_end(self) -> None:
        """Handle the end of the stream.  Raises ``ProtocolError`` if it cuts a frame."""
        if not self.is_between_frames and not self._is_stopped:
            raise ProtocolError("the stream ended in the middle of a frame")

    # -- inside ----------------------------------------------------------------------------------------------------

    def _landed_directly(self, count: int) -> None:
        """Count ``count`` bytes of the payload that were read into the sink's memory."""
        if self._tail and self._verifier is not None and self._target is not None:
            start = len(self._target) - self._missing
            self._verifier.add(self._target[start : start + count])
        self._missing -= count
        if self._missing == 0 and not self._tail:
            self._end_frame()

    def _feed(self, view: memoryview) -> memoryview:
        if self._staged:
            wanted = self._head_bytes if self._header is None else self._tail
            taken = min(wanted - self._staged, len(view))
            self._staging[self._staged : self._staged + taken] = view[:taken]
            self._staged += taken
            view = view[taken:]
            if self._staged < wanted:
                return view
            self._staged = 0
            if self._header is not None:
                self._take_tail(self._staging, 0)
            elif not self._begin_frame(self._decode(self._staging, 0)):
                self._staged = wanted
                return view
        rest = view[self._parse(view) :]
        if not self.is_held:
            self._staging[: len(rest)] = rest
            self._staged = len(rest)
            rest = rest[len(rest) :]
        return rest

    def _parse_staged(self, end: int) -> None:
        """Process the first ``end`` bytes of the staging area; move the rest of them to its front."""
        taken = self._parse(self._staging[:end])
        self._staged = end - taken
        self._staging[: self._staged] = bytes(self._staging[taken:end])

    def _parse(self, view: memoryview) -> int:
        """Process as much of ``view`` as possible: all but the beginning of a header or of a tail, unless held.

        Returns the number of bytes processed.
        """
        position, end = 0, len(view)
        while position < end and not self.is_held:
            if self._is_stopped:
                return end
            if self._header is not None and self._missing:
                position += self._take(view, position)
            elif end - position < (self._head_bytes if self._header is None else self._tail):
                break
            elif self._header is not None:
                self._take_tail(view, position)
                position += self._tail
            else:
                position = self._parse_frame(view, position)
        return position

    def _parse_frame(self, view: memoryview, position: int) -> int:
        """Process the header at ``position`` of ``view``, and the whole frame if it has arrived.

        Returns the position to continue at, which is ``position`` itself if the reader is held now.
        """
        header = self._decode(view, position)
        start = position + self._head_bytes
        stop = start + header.length
        tail = 0 if self._verifier is None else self._verifier.tail_bytes(header.length)
        if self._accept is not None and header.kind is not FrameKind.STRIPED and stop + tail <= len(view):
            if tail and self._verifier is not None:
                self._verifier.add(view[start:stop])
                self._verifier.check_payload(view, stop)
            if self._accept(header, view[start:stop]):
                self._count_frame()
                return stop + tail
            if tail:
                self._decode(view, position)  # restarts the checksum of the payload
        return start if self._begin_frame(header) else position

    def _decode(self, view: memoryview, position: int) -> FrameHeader:
        """Return the header at ``position`` of ``view``, checked."""
        if self._verifier is not None:
            self._verifier.check_header(view, position)
        return decode_header(view, max_length=self._max_length, offset=position)

    def _count_frame(self) -> None:
        if self._verifier is not None:
            self._verifier.next_frame()

    def _begin_frame(self, header: FrameHeader) -> bool:
        """Process a header; return False if its frame must wait."""
        if header.length == 0 and header.kind in _OF_THE_CONNECTION:
            self._count_frame()
            if header.kind is FrameKind.POSITION and self._on_position is not None:
                self._on_position(header.sequence)
            return True
        target = self._sink.lend(header)
        if self._is_stopped:
            return True
        if self.is_held:
            return False
        length = header.length if self._share is None else self._share(header)
        assert target is None or len(target) == length, f"{len(target)} bytes were lent for {header}"
        self._count_frame()
        self._header = header
        self._target = target
        self._missing = length
        self._tail = 0 if self._verifier is None else self._verifier.tail_bytes(length)
        if length == 0:
            self._end_frame()
        return True

    def _take(self, view: memoryview, position: int) -> int:
        """Move payload bytes out of ``view`` and return their number."""
        taken = min(self._missing, len(view) - position)
        if self._target is not None:
            start = len(self._target) - self._missing
            piece = view[position : position + taken]
            if self._tail and self._verifier is not None:
                self._verifier.add(piece)
            self._target[start : start + taken] = piece
        self._missing -= taken
        if self._missing == 0 and not self._tail:
            self._end_frame()
        return taken

    def _take_tail(self, view: memoryview, position: int) -> None:
        """Compare the checksum at ``position`` of ``view``, unless the payload was dropped, and end the frame."""
        if self._verifier is not None and self._target is not None:
            self._verifier.check_payload(view, position)
        self._end_frame()

    def _end_frame(self) -> None:
        header, self._header = self._header, None
        target, self._target = self._target, None
        assert header is not None
        if target is not None:
            self._sink.landed(header)
        if self._ended is not None and not self._is_stopped:
            self._ended(header)
