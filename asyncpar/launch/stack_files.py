"""Read the stacks of a rank that does not answer from its memory: the agent's side of ``core/observe/stack_dump.py``.

Nothing is sent to the process, and nothing in it stops: it may be stopped already, or in a C call.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from asyncpar.core.observe.stack_dump import read_stack_layout
from asyncpar.core.observe.stack_layout import read_stacks
from asyncpar.observe.stack_views import FrameView, ThreadView, is_of_user

_UNINTERRUPTIBLE: Final = "D"


class StackFile:
    """The file that describes how to read the stacks of one rank.  Owns ``descriptor``."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def read(self) -> tuple[ThreadView, ...]:
        """Return the threads of the process, the main one first, all as of one moment.

        Empty if they go on meanwhile, if they cannot be read (it has not described how, or this process may not), or if
        the kernel might block the reader.
        """
        found = read_stack_layout(self.descriptor)
        if found is None:
            return ()
        pid, layout = found
        if state_of(pid) in ("", _UNINTERRUPTIBLE):
            return ()
        try:
            memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
        except OSError:  # it has ended, or the system forbids it
            return ()
        try:
            stacks = read_stacks(lambda address, count: os.pread(memory, count, address), layout)
        finally:
            os.close(memory)
        return tuple(
            ThreadView(
                name="MainThread" if native == pid else f"thread {native}",
                frames=tuple(
                    FrameView(file=each.file, line=each.line, function=each.function, is_user=is_of_user(each.file))
                    for each in frames
                ),
                is_main=native == pid,
            )
            for native, frames in sorted(stacks, key=lambda stack: stack[0] != pid)
        )

    def close(self) -> None:
        """Close the file; if it has a name, it stays."""
        os.close(self.descriptor)


def state_of(pid: int) -> str:
    """Return the letter for the state of a process, "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
