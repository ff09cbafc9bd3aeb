"""The end of a stream of asyncio."""

from __future__ import annotations

import asyncio
from typing import Final

FLUSH_SECONDS: Final = 5.0
"""Seconds that a peer has to take what was written to it before its connection was closed."""


async def close_stream(writer: asyncio.StreamWriter) -> None:
    """Close the connection of ``writer``, which may have ended with an error, and wait for that.

    asyncio keeps the error that ends a connection for who waits for it; where nobody does, it prints "Future
    exception was never retrieved" some time later.
    """
    writer.close()
    try:
        async with asyncio.timeout(FLUSH_SECONDS):
            await writer.wait_closed()
    except OSError:  # reset, or TimeoutError: the peer does not take what is left
        writer.transport.abort()
