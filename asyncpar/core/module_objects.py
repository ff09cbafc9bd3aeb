"""Keep objects of modules from the garbage collector: most of what a process has is theirs, and hardly any garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_from_collection() -> Iterator[None]:
    """Import modules within: objects that are there at the end are not looked at by the garbage collector any more.

    It would traverse all of them several times while they are made, and again as the process ends: a third of what a
    process spends that imports the package and ends.  Garbage of the program is collected before.  Without effect
    where the program has put collection off.
    """
    if not gc.isenabled():
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
