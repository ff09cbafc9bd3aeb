"""The thread in which a replica computes, so that the event loop goes on moving data."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

from asyncpar.collectives.bridge import LoopBridge

T = TypeVar("T")
Args = TypeVarTuple("Args")


class ComputeWorker:
    """Runs one function at a time, in the order of the calls.

    Functions that wait for peers do so through ``bridge``.
    """

    def __init__(self, name: str, bridge: LoopBridge | None = None) -> None:
        self._bridge = bridge
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"compute {name}")

    async def run(self, function: Callable[[*Args], T], *args: *Args) -> T:
        """Return what ``function`` returns.

        A thread cannot be stopped: a caller that is cancelled is kept until ``function`` has come to its end, because
        what it writes to, such as gradients, may be used again after that.  What it waits for over the bridge is
        interrupted, so that this end comes soon; the bridge has to be resumed before it is used again.
        """
        running = asyncio.get_running_loop().run_in_executor(self._executor, function, *args)
        cancelled: asyncio.CancelledError | None = None
        while not running.done():
            try:
                await asyncio.wait({running})
            except asyncio.CancelledError as error:
                cancelled = error
                if self._bridge is not None:
                    self._bridge.interrupt()
        if cancelled is not None:
            running.exception()  # nobody is left to hear it
            raise cancelled
        return running.result()

    def close(self) -> None:
        """Take no more calls.  Waits for nothing; the thread ends after what it is doing."""
        self._executor.shutdown(wait=False, cancel_futures=True)
