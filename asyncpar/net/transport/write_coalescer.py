"""Coalescing of small messages into one write.

Theory of operation.  A system call costs more than everything else done for a small message, and actors often send many
of them in one turn of the event loop.  The first message of a turn is sent at once, so that a single one is not
delayed; the others are gathered and sent at the end of the turn, or as soon as there are enough of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from asyncpar.net.wire.frame import Payload, PayloadChecksum, views_of

GATHERED_BYTES: Final = 1500
"""Most bytes, about, of messages sent together: ten or so, which makes the system call cheap.

More would keep the peer waiting, which could already be working on the first of them.
"""


class WriteCoalescer:
    """Gathers the messages of a turn and passes them to ``send`` as bytes to which no other reference exists."""

    def __init__(self, send: Callable[[bytearray], None]) -> None:
        self.waiting = bytearray()
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._is_within = False

    def add(self, head: bytes, payload: Payload, checksum: PayloadChecksum | None = None) -> bool:
        """Gather a copy of a message; return False if it is the turn's first, or large, and must be sent by itself."""
        if not self._is_within:
            self._is_within = True
            self._loop.call_soon(self._end_turn)
            return False
        if len(payload) > GATHERED_BYTES:
            return False
        self.waiting += head
        for view in views_of(payload):
            self.waiting += view
        if checksum is not None:
            checksum.cover(payload, len(payload))
            self.waiting += checksum.tail()
        if len(self.waiting) > GATHERED_BYTES:
            self.flush()
        return True

    def flush(self) -> None:
        """Send the gathered messages."""
        if self.waiting:
            gathered, self.waiting = self.waiting, bytearray()
            self._send(gathered)

    def _end_turn(self) -> None:
        self._is_within = False
        self.flush()
