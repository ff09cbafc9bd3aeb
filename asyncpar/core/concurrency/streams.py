"""Closing of asyncio streams."""

from __future__ import annotations

import asyncio
from typing import Final

FLUSH_SECONDS: Final = 5.0
"""Seconds for which a peer may still receive data written before its connection was closed."""


async def close_stream(writer: asyncio.StreamWriter) -> None:
    """Close the connection of ``writer``, which may have ended with an error, and wait until it is closed.

    asyncio keeps the error that ends a connection for a waiter; if there is none, it prints "Future exception was never
    retrieved" some time later.
    """
    writer.close()
    try:
        async with asyncio.timeout(FLUSH_SECONDS):
            await writer.wait_closed()
    except OSError:  # reset, or TimeoutError: the peer does not take the rest
        writer.transport.abort()
