"""Sends that wait in the queue of a byte channel; shared by the lanes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncpar.errors import PeerLost
from asyncpar.net.transport.lane import LENT_KINDS, Sending, fail_future
from asyncpar.net.wire.frame import VOID, FrameHeader, FrameSealer, Payload, PayloadChecksum, encode_header
from asyncpar.net.wire.writer import FrameWriter, OutgoingFrame

OWNED_LIMIT = 32 * 1024 * 1024
"""Most bytes of copied frames (control and eager) that may wait.

Eager payloads are bounded by credit and control frames are few, so a peer that exceeds this does not read at all.
"""


class QueuedSending(Sending):
    """A frame that waits in a ``SendQueue`` in its sender's memory."""

    __slots__ = ("_frame", "_writer")

    def __init__(self, writer: FrameWriter, done: asyncio.Future[None]) -> None:
        self._writer = writer
        self._frame: OutgoingFrame | None = None
        self.done = done

    def hold(self, frame: OutgoingFrame) -> None:
        """Store the frame for a later release."""
        self._frame = frame

    def written(self) -> None:
        """Complete the send: the channel has taken the last byte."""
        if not self.done.done():
            self.done.set_result(None)

    @property
    def waiting_bytes(self) -> int:
        return 0 if self._frame is None else len(self._frame)

    @property
    def is_through(self) -> bool:
        """Whether the channel has taken all of it."""
        return self.done.done() and not self.done.cancelled() and self.done.exception() is None

    @property
    def has_begun(self) -> bool:
        """Whether the channel has taken some of it."""
        return self._frame is not None and self._frame.has_begun

    def release(self) -> bool:
        if self._frame is None:
            return False
        goes_out = self._writer.release(self._frame)
        self.done.cancel()
        return goes_out

    def give_back(self, error: PeerLost) -> None:
        """Release the memory as ``release`` does, and end with ``error``."""
        if self._frame is not None:
            self._writer.release(self._frame)
        fail_future(self.done, error)

    def keep(self) -> None:
        """Release the memory before this returns, like ``release``, but send the frame in any case."""
        if self._frame is not None:
            self._writer.keep(self._frame)
            self.done.cancel()


class SendQueue:
    """Frames that the channel could not take at once, sealed by ``sealer`` (None: not sealed)."""

    def __init__(self, sealer: FrameSealer | None = None) -> None:
        self.writer = FrameWriter()
        self._sealer = sealer
        self._loop = asyncio.get_running_loop()
        self._sendings: dict[QueuedSending, None] = {}
        self._owned = 0

    @property
    def is_overfull(self) -> bool:
        """Whether the peer has stopped reading, so that copied frames pile up."""
        return self._owned > OWNED_LIMIT

    async def flush(self, done: asyncio.Future[None], seconds: float) -> None:
        """Wait for ``done`` as long as the channel takes bytes.

        Raises ``TimeoutError`` after ``seconds`` in which it took none.
        """
        while not done.done():
            waiting = self.writer.waiting_bytes
            await asyncio.wait({done}, timeout=seconds)
            if not done.done() and self.writer.waiting_bytes >= waiting:
                raise TimeoutError

    def push(
        self,
        header: FrameHeader,
        head: bytes,
        payload: Payload,
        *,
        taken: int = 0,
        checksum: PayloadChecksum | None = None,
    ) -> QueuedSending | None:
        """Queue one frame of which the channel has already taken ``taken`` bytes, under the rules of ``Lane.send``."""
        if header.kind not in LENT_KINDS:
            tail = b""
            if checksum is not None:
                checksum.cover(payload, len(payload))
                tail = checksum.tail()
            self.push_owned(head + bytes(payload) + tail, taken=taken)
            return None
        sending = QueuedSending(self.writer, self._loop.create_future())
        self._sendings[sending] = None
        sending.done.add_done_callback(lambda _: self._sendings.pop(sending, None))
        sealer = self._sealer
        void = None if sealer is None else lambda: sealer.seal_instead(memoryview(head), encode_header(VOID))
        frame = self.writer.push(head, payload, taken=taken, written=sending.written, checksum=checksum, void=void)
        sending.hold(frame)
        return sending

    def push_owned(self, frames: bytes | bytearray, *, taken: int = 0) -> None:
        """Queue whole small frames, whose memory the queue owns."""
        size = len(frames)
        self._owned += size
        self.writer.push(frames, b"", taken=taken, written=lambda: self._disown(size))

    def fail(self, error: PeerLost) -> None:
        """Drop everything; pending sends end with ``error``."""
        self.writer.clear()
        for sending in list(self._sendings):
            fail_future(sending.done, error)

    def release_all(self, error: PeerLost) -> None:
        """Release all payloads: pending sends end with ``error``; frames that have begun are sent from a copy."""
        for sending in list(self._sendings):
            sending.give_back(error)

    def _disown(self, size: int) -> None:
        self._owned -= size


class MessageSending(Sending):
    """A message that is not sent yet.  Releasing it notifies the receiver, which would hold later ones back for it."""

    __slots__ = ("_inner", "_taken_back")

    def __init__(self, inner: Sending, taken_back: Callable[[], None]) -> None:
        self._inner = inner
        self._taken_back: Callable[[], None] | None = taken_back
        self.done = inner.done

    @property
    def waiting_bytes(self) -> int:
        return self._inner.waiting_bytes

    def release(self) -> bool:
        goes_out = self._inner.release()
        taken_back, self._taken_back = self._taken_back, None
        if not goes_out and taken_back is not None:
            taken_back()
        return goes_out
