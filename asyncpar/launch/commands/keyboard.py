"""Keys pressed in the terminal of a command."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LEAVING_KEYS = frozenset("qQ\x04")
"""q and Ctrl-D."""


@contextmanager
def read_keys(descriptor: int = 0) -> Iterator[Callable[[float], str]]:
    """Yield a function that waits so many seconds for keys, and returns those that were pressed ("": none).

    Inside the block, keys arrive one by one and are not echoed; Ctrl-C interrupts as usual.  Where ``descriptor`` is
    not a terminal, or the system has none, the function only waits.  A terminal that is gone counts as q.
    """
    try:
        import termios  # neither exists on every system
        import tty
    except ImportError:
        yield _only_wait
        return
    if not os.isatty(descriptor):
        yield _only_wait
        return

    def wait(seconds: float) -> str:
        if not select.select([descriptor], [], [], seconds)[0]:
            return ""
        try:
            return os.read(descriptor, 64).decode(errors="replace") or "q"
        except OSError:
            return "q"

    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor, termios.TCSANOW)
    try:
        yield wait
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)


def _only_wait(seconds: float) -> str:
    time.sleep(seconds)
    return ""
