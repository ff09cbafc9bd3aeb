"""A rank's file for its agent: the layout for reading its stacks from outside, and the stack of a crash.

The agent passes the file to the rank (``ASYNCPAR_STACKS_FD``).  The rank writes in its first line where its interpreter
keeps its stacks (``stack_layout.py``), so the agent can read them when the rank cannot answer: no signal is sent,
because one would interrupt waiting system calls.  A crash (SIGSEGV, SIGABRT and the like) leaves its stack after that
line, by ``faulthandler``.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Mapping
from typing import Final

import msgspec

from asyncpar.core.observe.stack_layout import StackLayout, find_layout

STACKS_FD: Final = "ASYNCPAR_STACKS_FD"
"""The variable with the number of the inherited descriptor of the file for stacks."""

_READY: Final = b"ready "
_LONGEST_LINE: Final = 4096
_MOST_BYTES: Final = 256 << 10


def open_stack_dump(environment: Mapping[str, str]) -> None:
    """Make the stacks of this process readable to the agent that started it, if it has passed a file for them."""
    text = environment.get(STACKS_FD, "")
    if not (text.isascii() and text.isdecimal()):
        return
    descriptor = int(text)
    try:
        os.set_inheritable(descriptor, False)
        if os.fstat(descriptor).st_size:  # a program started by a rank inherits its variables
            return
        os.write(descriptor, _READY + msgspec.json.encode((os.getpid(), _own_layout())) + b"\n")
    except OSError:
        return
    if not faulthandler.is_enabled():
        faulthandler.enable(file=descriptor)


def _own_layout() -> StackLayout | None:
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY)
    except OSError:  # not Linux
        return None
    try:
        return find_layout(lambda address, count: os.pread(memory, count, address))
    finally:
        os.close(memory)


def read_stack_dump(descriptor: int) -> str:
    """Return the stack written when the process crashed, "" if it has not."""
    content = os.pread(descriptor, _MOST_BYTES, 0)
    if content.startswith(_READY):
        content = content.partition(b"\n")[2]
    return content.decode("utf-8", "replace").strip("\n")


def read_stack_layout(descriptor: int) -> tuple[int, StackLayout] | None:
    """Return the process that wrote the file, and its layout; None if there is none."""
    line, _, _ = os.pread(descriptor, _LONGEST_LINE, 0).partition(b"\n")
    if not line.startswith(_READY):
        return None
    try:
        pid, layout = msgspec.json.decode(line.removeprefix(_READY), type=tuple[int, StackLayout | None])
    except msgspec.DecodeError:
        return None
    return None if layout is None else (pid, layout)
