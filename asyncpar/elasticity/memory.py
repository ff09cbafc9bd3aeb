"""Memory of large arrays: check that it is free before it is allocated, and populate it before it is touched."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable
from typing import Any

import psutil
from numpy.typing import NDArray

from asyncpar.core.descriptors import is_exhausted
from asyncpar.errors import SnapshotTooLarge

_MADV_POPULATE_WRITE = 23
_LEFT_ALONE = 0.05
"""The share of the available memory that is left to others."""


def check_room(nbytes: int, what: str, *, available: int | None = None) -> None:
    """Raise ``SnapshotTooLarge``, naming ``what``, unless ``nbytes`` fit into memory (default: of this machine)."""
    if available is None:
        try:
            available = int(psutil.virtual_memory().available)
        except OSError as error:
            if not is_exhausted(error):
                raise
            return  # no file can be opened to read the size
    room = int(available * (1.0 - _LEFT_ALONE))
    if nbytes > room:
        raise SnapshotTooLarge(f"{what} need {nbytes} bytes of memory, and there are {room}; nothing was changed")


def populate(arrays: Iterable[NDArray[Any]]) -> None:
    """Have the system back ``arrays`` with memory now, even while they are written; may run in any thread.

    Page faults at the first touch take several times as long.  Where the system does not support it (before Linux
    5.14) nothing happens.
    """
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is None or not sys.platform.startswith("linux"):
        return
    for array in arrays:
        begin = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (array.ctypes.data + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_POPULATE_WRITE)
