"""Work on arrays that would block the event loop, in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from asyncpar.core.concurrency.worker import until_done

T = TypeVar("T")

INLINE_BYTES = 1 << 18
"""Work on an array of up to so many bytes takes less time than handing it to a thread."""

INLINE_COPY_BYTES = 4 << 20
"""Copying more bytes than this into fresh memory blocks the loop for a millisecond or more."""


async def off_loop(work: Callable[[], T], *, nbytes: int, inline: int | None = None) -> T:
    """Do ``work`` on ``nbytes`` of memory: here if they are at most ``inline``, else in a thread.

    ``inline`` is ``INLINE_BYTES`` by default.  A cancelled caller waits for the thread all the same (milliseconds),
    because others will use the memory; what the work returns or raises is then dropped.
    """
    if nbytes <= (INLINE_BYTES if inline is None else inline):
        return work()
    return await until_done(asyncio.get_running_loop().run_in_executor(None, work))
