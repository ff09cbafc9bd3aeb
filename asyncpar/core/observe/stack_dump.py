"""Stacks of a rank whose interpreter does not come to answer: written by a signal handler in C (``faulthandler``).

The agent hands down a file (``ASYNCPAR_STACKS_FD``).  The rank says in it that the handler is there; then the agent may
send ``STACK_SIGNAL`` to one thread after another, each of which writes its own stack, and reads what was written.  It
needs neither the interpreter lock nor a debugger.  A crash
(SIGSEGV, SIGABRT and the like) leaves its stack there, too.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

STACKS_FD: Final = "ASYNCPAR_STACKS_FD"
"""The variable with the number of the inherited descriptor of the file for stacks."""

STACK_SIGNAL: Final[int] = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else 0
"""A signal that no program uses: SIGUSR2, the usual one, is passed on from batch systems to programs.

0 where the system has no such signals: then nobody is asked for stacks in this way.
"""

_READY: Final = b"ready\n"
_MOST_BYTES: Final = 256 << 10


def open_stack_dump(environment: Mapping[str, str]) -> None:
    """Let the agent that has started this process have its stacks, if it has given a file for that."""
    text = environment.get(STACKS_FD, "")
    if (
        not STACK_SIGNAL
        or not (text.isascii() and text.isdecimal())
        or signal.getsignal(STACK_SIGNAL) is not signal.SIG_DFL
    ):
        return
    descriptor = int(text)
    try:
        os.set_inheritable(descriptor, False)
        if os.fstat(descriptor).st_size:  # a program that a rank has started has its variables
            return
        os.write(descriptor, _READY)
    except OSError:
        return
    # What ``faulthandler`` puts back when the interpreter ends: a rank that is asked then goes on to its end.
    if threading.current_thread() is threading.main_thread():
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)
    # Each thread writes its own: to walk the frames of one that runs meanwhile crashes this Python now and then.
    faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=False)
    if not faulthandler.is_enabled():
        faulthandler.enable(file=descriptor)


def signal_name(number: int) -> str:
    """Return ``SIGTERM`` or ``SIGRTMIN+3``; the signal of ours with what it is for."""
    if number == STACK_SIGNAL:
        return f"SIGRTMAX-{signal.SIGRTMAX - number} ({number}), by which asyncpar asks for stacks"
    try:
        return signal.Signals(number).name
    except ValueError:
        pass
    least = getattr(signal, "SIGRTMIN", 0)
    is_real_time = least and least < number < signal.SIGRTMAX
    return f"SIGRTMIN+{number - least}" if is_real_time else f"signal {number}"


def read_stack_dump(descriptor: int, start: int = 0) -> str:
    """Return what was written into the file from byte ``start`` on, without what says that it is there."""
    content = os.pread(descriptor, _MOST_BYTES, start)
    return content.removeprefix(_READY).decode("utf-8", "replace").strip("\n")


def is_ready(descriptor: int, pid: int) -> bool:
    """Would the process write its stacks now, instead of ending by the signal?"""
    if os.pread(descriptor, len(_READY), 0) != _READY:
        return False
    try:
        status = Path(f"/proc/{pid}/status").read_text("ascii", errors="replace")
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (STACK_SIGNAL - 1) & 1)
