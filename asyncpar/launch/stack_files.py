"""Ask a rank that does not answer for its stacks by a signal: the agent's end of ``core/observe/stack_dump.py``."""

from __future__ import annotations

import asyncio
import os
from typing import Final

from asyncpar.core.observe.stack_dump import STACK_SIGNAL, is_ready, read_stack_dump

_PATIENCE: Final = 0.3
_POLL_SECONDS: Final = 0.02


class StackFile:
    """The file into which one rank writes its stacks.  Owns ``descriptor``."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    async def ask(self, pid: int) -> str:
        """Have process ``pid`` write its stacks, and return them; "" if it cannot."""
        if not is_ready(self.descriptor, pid):
            return ""
        before = size = os.fstat(self.descriptor).st_size
        try:
            os.kill(pid, STACK_SIGNAL)
        except ProcessLookupError:
            return ""
        for _ in range(round(_PATIENCE / _POLL_SECONDS)):
            await asyncio.sleep(_POLL_SECONDS)
            last, size = size, os.fstat(self.descriptor).st_size
            if size == last > before:  # all is written
                break
        return read_stack_dump(self.descriptor, before)

    def close(self) -> None:
        """Close the file, which stays where it has a name."""
        os.close(self.descriptor)
