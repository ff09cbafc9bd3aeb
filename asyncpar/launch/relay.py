"""Pass on what comes out of a pipe of a rank, at the pace of those who take it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

CHUNK_BYTES = 1 << 16

Taker = Callable[[bytes], Awaitable[None]]


class Relay:
    """Reads one pipe to its end and awaits ``take`` for each chunk; so at most a few chunks wait, whatever comes.

    ``take`` is called with ``b""`` once, at the end.
    """

    def __init__(self, descriptor: int, take: Taker) -> None:
        """Own ``descriptor`` from now on."""
        self._descriptor = descriptor
        self._take = take
        self._transport: asyncio.ReadTransport | None = None
        self._is_reading = False
        self._is_closed = False

    @property
    def is_starved(self) -> bool:
        """Does it wait for the rank, and not for ``take``?"""
        return self._is_reading

    async def run(self) -> None:
        """Relay until the pipe ends or ``close``."""
        if self._is_closed:
            return
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=CHUNK_BYTES)
        pipe = os.fdopen(self._descriptor, "rb", buffering=0)
        self._transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            while chunk := await self._read(reader):
                await self._take(chunk)
            await self._take(b"")
        finally:
            self._transport.close()

    def close(self) -> None:
        """Behave as if the pipe ended now: some process that is none of ours holds its other end."""
        if self._transport is None and not self._is_closed:
            os.close(self._descriptor)
        self._is_closed = True
        if self._transport is not None:
            self._transport.close()

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        self._is_reading = True
        try:
            return await reader.read(CHUNK_BYTES)
        finally:
            self._is_reading = False
