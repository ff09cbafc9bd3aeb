"""Loading of modules without garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Postpone garbage collection while modules are loaded, and then treat their objects as old ones.

    Modules create so many objects, nearly all permanent, that Python would traverse all objects of the program
    meanwhile, a dozen times for a rank, and the new ones twice afterwards: 50 ms, and 120 ms in a program with torch.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():  # otherwise the program has frozen objects, which must stay so
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()
