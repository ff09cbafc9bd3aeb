"""Ask a rank that does not answer for its stacks by signals: the agent's end of ``core/observe/stack_dump.py``."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from typing import Final

from asyncpar.core.observe.stack_dump import STACK_SIGNAL, is_ready, read_stack_dump

_PATIENCE: Final = 0.3
"""Seconds that all threads have to write in."""

_THREAD_PATIENCE: Final = 0.03
"""Seconds that a thread has which is not the main one; threads of C libraries write nothing."""

_POLL_SECONDS: Final = 0.005
_SETTLED_SECONDS: Final = 0.02
"""Seconds without a change after which a thread has written all."""

_HEAD: Final = "Stack (most recent call first):"


class StackFile:
    """The file into which one rank writes its stacks.  Owns ``descriptor``."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._asking = 0
        self._is_closed = False

    async def ask(self, pid: int) -> str:
        """Have the threads of process ``pid`` write their stacks, the main one first; return them, it last; "" if not.

        The text is as ``faulthandler`` writes the stacks of all threads.  The file is kept until this has ended: the
        signal may be what ends a call in C, and then the process.
        """
        self._asking += 1
        try:
            return await self._ask(pid) if is_ready(self.descriptor, pid) else ""
        finally:
            self._asking -= 1
            if self._is_closed:
                self.close()

    async def _ask(self, pid: int) -> str:
        until = time.monotonic() + _PATIENCE
        stacks = [main] if (main := await self._ask_thread(pid, pid, until)) else []
        for thread in _threads_of(pid) if main else ():
            limit = min(until, time.monotonic() + _THREAD_PATIENCE)
            if not is_ready(self.descriptor, pid):
                break
            if thread != pid and time.monotonic() < limit and (text := await self._ask_thread(pid, thread, limit)):
                stacks.insert(0, text)
        return "\n\n".join(stacks)

    async def _ask_thread(self, pid: int, thread: int, until: float) -> str:
        before = size = os.fstat(self.descriptor).st_size
        if not _signal_thread(pid, thread):
            return ""
        changed = time.monotonic()
        while time.monotonic() < until:
            await asyncio.sleep(_POLL_SECONDS)
            last, size = size, os.fstat(self.descriptor).st_size
            if size != last:
                changed = time.monotonic()
            elif size > before and time.monotonic() - changed >= _SETTLED_SECONDS:
                break
        text = read_stack_dump(self.descriptor, before)
        return text.replace(_HEAD, f"Thread {thread:#x} (most recent call first):", 1) if text.startswith(_HEAD) else ""

    def close(self) -> None:
        """Close the file, which stays where it has a name, once nobody asks."""
        self._is_closed = True
        if not self._asking:
            os.close(self.descriptor)


def _threads_of(pid: int) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))
    except FileNotFoundError:
        return []


def _signal_thread(pid: int, thread: int) -> bool:
    """Send the signal to one thread of a process; return whether it is there, and can be reached alone."""
    library = ctypes.CDLL(None)
    if hasattr(library, "tgkill"):
        return int(library.tgkill(pid, thread, STACK_SIGNAL)) == 0
    if thread != pid:  # glibc before 2.30
        return False
    try:
        os.kill(pid, STACK_SIGNAL)  # the main thread takes it
    except ProcessLookupError:
        return False
    return True
