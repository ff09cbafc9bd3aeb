"""The file descriptors of this process: how many it may have, and which of them connections of others may not take.

The kernel hands out the lowest number that is free, so the number of a fresh descriptor says how many are in use at
least: no listener has to count.
"""

from __future__ import annotations

import os
import sys
from typing import Final

from asyncpar.core.system_errors import FULL

_FALLBACK: Final = 1024
_USUAL: Final = 64
"""Descriptors that a process of ours has open when nobody is connected to it, generously."""

_LEAST_PLACES: Final = 4
_LEAST_RESERVE: Final = 16
_MOST_RESERVE: Final = 256


def descriptor_limit() -> int:
    """Return how many file descriptors this process may have."""
    if sys.platform == "win32":
        return _FALLBACK
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 31 if soft == resource.RLIM_INFINITY else soft


def descriptor_reserve(limit: int) -> int:
    """Return how many of ``limit`` descriptors the process keeps for itself: its files, pipes, children and peers."""
    return max(_LEAST_RESERVE, min(_MOST_RESERVE, limit // 4))


def spare_descriptors(limit: int) -> int:
    """Return how many of ``limit`` descriptors connections of strangers may take, to all listeners together."""
    return max(0, limit - descriptor_reserve(limit) - _USUAL)


def places(most: int, limit: int) -> int:
    """Return how many connections of strangers one listener may hold: ``most``, or fewer where ``limit`` is low."""
    return min(most, max(_LEAST_PLACES, spare_descriptors(limit) // 16))


def accepted_at_once(most: int, limit: int) -> int:
    """Return how many connections may be accepted in one turn of the loop: they are there before any is closed."""
    return max(1, min(most, descriptor_reserve(limit) // 4))


def is_reserved(descriptor: int) -> bool:
    """Return whether a fresh ``descriptor`` is one of the last, which no connection of a stranger may keep."""
    limit = descriptor_limit()
    return descriptor >= limit - descriptor_reserve(limit)


def is_exhausted(error: OSError) -> bool:
    """Return whether ``error`` says that there is no descriptor left, so that the same may succeed a moment later."""
    return error.errno in FULL


def has_room(count: int) -> bool:
    """Return whether the process can open ``count`` more descriptors now."""
    opened: list[int] = []
    try:
        opened.append(os.open(os.devnull, os.O_RDWR))
        opened.extend(os.dup(opened[0]) for _ in range(count - 1))
    except OSError as error:
        if not is_exhausted(error):
            raise
        return False
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return True


class SpareDescriptor:
    """Two descriptors that are held so that any other can be duplicated when the process has no more of them."""

    def __init__(self) -> None:
        self._null = os.open(os.devnull, os.O_RDWR)
        self._spare = os.dup(self._null)

    def lend(self, descriptor: int) -> int:
        """Return a duplicate of ``descriptor``, to use until ``take_back`` and not to close.  Raises ``OSError``."""
        return os.dup2(descriptor, self._spare, inheritable=False)

    def take_back(self) -> None:
        """Close the duplicate."""
        os.dup2(self._null, self._spare, inheritable=False)

    def close(self) -> None:
        os.close(self._spare)
        os.close(self._null)
