"""The heap of the C library."""

from __future__ import annotations

import ctypes
import sys


def give_back_free_memory() -> None:
    """Give the system what the allocator of the C library keeps of freed memory, where that can be asked for (glibc).

    It keeps holes that lie between what is in use.  This takes about a millisecond: call it once, after a program has
    freed much that it does not take again.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
