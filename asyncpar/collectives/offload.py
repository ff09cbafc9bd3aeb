"""Work on arrays that would hold up the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncpar.net.wire.payload import UnwrittenPayload

INLINE_BYTES = 1 << 18
"""Up to here work on an array is over in less time than handing it to a thread would take."""


async def off_loop(work: Callable[[], None], *, nbytes: int) -> None:
    """Do ``work`` on ``nbytes`` of memory, in a thread when it would hold up the loop.

    A cancelled caller still waits for the thread (milliseconds), because others will use the same memory; what the work
    raises is then dropped.
    """
    if nbytes <= INLINE_BYTES:
        work()
        return
    running = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        running.exception()
        raise


LONG_BYTES = 4 << 20
"""Copying a payload of more bytes into fresh memory holds up the loop: that takes a millisecond or so."""


async def write_payload(payload: UnwrittenPayload) -> memoryview:
    """Return the bytes of ``payload``, copied in a thread if they are many.  Nobody changes its arrays meanwhile."""
    if payload.nbytes <= LONG_BYTES:
        return payload.write()
    written: list[memoryview] = []
    await off_loop(lambda: written.append(payload.write()), nbytes=payload.nbytes)
    return written[0]
