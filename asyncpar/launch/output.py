"""Write to our own stdout and stderr without ever blocking the event loop.

A thread per stream does the writing, one job at a time, in order.  Whoever submits a job awaits its end, so a slow
reader holds back those who produce, and memory stays bounded.  The threads are daemons: a reader that stopped reading
cannot keep the launcher from ending.
"""

from __future__ import annotations

import asyncio
import os
import queue
import select
import threading
from collections.abc import Callable


class OutputStream:
    """One descriptor and the thread that writes to it."""

    def __init__(self, descriptor: int, *, name: str) -> None:
        self._descriptor = descriptor
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], asyncio.Future[None]] | None]
        self._jobs = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"asyncpar-{name}", daemon=True)
        self._thread.start()

    async def write(self, chunk: bytes) -> None:
        """Return once ``chunk`` is in the kernel's hands.  Raises ``BrokenPipeError`` when nobody reads any more."""
        await self.run(lambda: write_all(self._descriptor, chunk))

    async def run(self, job: Callable[[], None]) -> None:
        """Run ``job`` in the writing thread, after all earlier ones, and return when it is done."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._jobs.put((job, done))
        await done

    def close(self, *, patience: float = 0.2) -> None:
        """End the thread after the job it is in, and wait for that at most ``patience`` seconds."""
        self._jobs.put(None)
        self._thread.join(patience)

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, done = entry
            try:
                job()
            except Exception as error:  # noqa: BLE001  # belongs to whoever awaits the job
                _settle(done, error)
            else:
                _settle(done, None)


def _settle(done: asyncio.Future[None], error: Exception | None) -> None:
    """Give the result to the loop, if that still runs."""

    def settle() -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    try:
        done.get_loop().call_soon_threadsafe(settle)
    except RuntimeError:  # the loop is closed: nobody waits
        return


def write_all(descriptor: int, chunk: bytes) -> None:
    """Write all of ``chunk``, waiting for room; also where somebody made the descriptor non-blocking."""
    rest = memoryview(chunk)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            select.select([], [descriptor], [])
