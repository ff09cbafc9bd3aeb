"""Write to our own stdout and stderr without ever blocking the event loop.

A thread per stream does the writing, one job at a time, in order.  Whoever submits a job awaits its end, so a slow
reader holds back those who produce, and memory stays bounded.  The threads are daemons: a reader that stopped reading
cannot keep the launcher from ending.
"""

from __future__ import annotations

import os
import select

from asyncpar.core.concurrency.worker import DaemonThread


class OutputStream(DaemonThread):
    """One descriptor and the thread that writes to it."""

    def __init__(self, descriptor: int, *, name: str) -> None:
        super().__init__(f"asyncpar-{name}")
        self._descriptor = descriptor

    async def write(self, chunk: bytes) -> None:
        """Return once ``chunk`` is in the kernel's hands.  Raises ``BrokenPipeError`` when the reader has gone."""
        await self.run(lambda: write_all(self._descriptor, chunk))


def write_all(descriptor: int, chunk: bytes) -> None:
    """Write all of ``chunk``, waiting for room; also where somebody made the descriptor non-blocking."""
    rest = memoryview(chunk)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            select.select([], [descriptor], [])
