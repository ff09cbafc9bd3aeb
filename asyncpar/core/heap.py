"""The heap of the C library."""

from __future__ import annotations

import ctypes
import sys


def give_back_free_memory() -> None:
    """Return memory that the C library's allocator keeps after it was freed to the system, where possible (glibc).

    Holes between used memory stay.  This takes about a millisecond: call it once, after a program has freed much memory
    that it will not need again.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
