"""Work on arrays that would hold up the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

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
