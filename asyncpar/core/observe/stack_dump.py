"""The file of a rank for its agent: how its stacks are read from outside, and where it was as it crashed.

The agent hands down the file (``ASYNCPAR_STACKS_FD``).  The rank writes in its first line where its interpreter keeps
its stacks (``stack_layout.py``), so that the agent can read them when it does not come to answer: no signal is sent, as
one would end system calls that wait.  A crash (SIGSEGV, SIGABRT and the like) leaves its stack behind that line, by
``faulthandler``.
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
    """Let the agent that has started this process have its stacks, if it has given a file for that."""
    text = environment.get(STACKS_FD, "")
    if not (text.isascii() and text.isdecimal()):
        return
    descriptor = int(text)
    try:
        os.set_inheritable(descriptor, False)
        if os.fstat(descriptor).st_size:  # a program that a rank has started has its variables
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
    """Return what was written as the process crashed, "" if it has not."""
    content = os.pread(descriptor, _MOST_BYTES, 0)
    if content.startswith(_READY):
        content = content.partition(b"\n")[2]
    return content.decode("utf-8", "replace").strip("\n")


def read_stack_layout(descriptor: int) -> tuple[int, StackLayout] | None:
    """Return the process that has written into the file, and its layout; None if there is none."""
    line, _, _ = os.pread(descriptor, _LONGEST_LINE, 0).partition(b"\n")
    if not line.startswith(_READY):
        return None
    try:
        pid, layout = msgspec.json.decode(line.removeprefix(_READY), type=tuple[int, StackLayout | None])
    except msgspec.DecodeError:
        return None
    return None if layout is None else (pid, layout)
