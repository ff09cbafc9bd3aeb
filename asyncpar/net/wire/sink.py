"""What the receiving end of frames offers to whoever decodes them."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from asyncpar.net.wire.header import FrameHeader


class FrameSink(Protocol):
    """Lends memory for payloads and is told when they are there.  Never awaits, never blocks."""

    def lend(self, header: FrameHeader) -> memoryview | None:
        """Return exactly ``header.length`` writable bytes where the payload must land, or None to drop it.

        Called once per frame, before its payload.  Raises ``ProtocolError`` to end the connection.
        """
        ...

    def landed(self, header: FrameHeader) -> None:
        """The payload of the frame last lent for is complete.  Not called for dropped payloads."""
        ...


@runtime_checkable
class WholeSink(Protocol):
    """What a sink may offer besides: to take small frames whole, which is quicker."""

    def accept(self, header: FrameHeader, payload: memoryview) -> bool:
        """Take a frame and copy its payload, which is valid during the call; False to get it by ``lend`` instead."""
        ...
