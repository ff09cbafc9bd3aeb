"""Objects that tests leave for the whole session, which the garbage collector need not look through."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress


class LastingObjects:
    """Keeps what is alive after every so many tests out of what the garbage collector looks through.

    pytest keeps some thirty objects of each test.  After ten thousand tests looking through them takes a quarter of a
    second, whenever a test collects to see that nothing is left behind.
    """

    def __init__(self, *, every: int = 500) -> None:
        self._every = every
        self._tests = 0

    def count(self, *, is_module_over: bool) -> None:
        """Count a test that has ended; what its module's fixtures have made is gone if that is over."""
        self._tests += 1
        if self._tests >= self._every and is_module_over:
            self._tests = 0
            gc.collect()
            gc.freeze()
            with suppress(AttributeError):  # of glibc: what arrays of tests have left free, hundreds of MB, goes back
                ctypes.CDLL(None).malloc_trim(0)
