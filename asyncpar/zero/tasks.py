"""Waiting for several tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any


async def first_failure(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Wait until all ``tasks`` have succeeded, or raise the error of the first one that failed."""
    if tasks:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in sorted((task for task in tasks if task.done()), key=asyncio.Task.cancelled):
        task.result()


async def stopped(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel ``tasks`` and wait until they have ended, however they end."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not report it as never retrieved


async def ended(task: asyncio.Task[Any]) -> None:
    """Wait for ``task``, which waits for no other rank, even if the caller is cancelled meanwhile."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled
