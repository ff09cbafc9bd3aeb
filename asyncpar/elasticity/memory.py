"""Check that memory is free before it is allocated: the kernel kills a process that takes too much."""

from __future__ import annotations

import psutil

from asyncpar.errors import SnapshotTooLarge

_LEFT_ALONE = 0.05
"""Part of the available memory that is left to others."""


def check_room(nbytes: int, what: str, *, available: int | None = None) -> None:
    """Raise ``SnapshotTooLarge``, naming ``what``, unless ``nbytes`` fit into memory (default: of this machine)."""
    if available is None:
        available = int(psutil.virtual_memory().available)
    room = int(available * (1.0 - _LEFT_ALONE))
    if nbytes > room:
        raise SnapshotTooLarge(f"{what} need {nbytes} bytes of memory, and there are {room}; nothing was changed")
