"""The file descriptors of this process: their limit, and the reserve that connections of strangers may not use.

The kernel hands out the lowest free number, so the number of a new descriptor is a lower bound on how many are in use:
no listener has to count.
"""

from __future__ import annotations

import os
import sys
from typing import Final

from asyncpar.core.system_errors import FULL

_FALLBACK: Final = 1024
_USUAL: Final = 64
"""A generous number of descriptors that one of our processes has open when nobody is connected to it."""

_LEAST_PLACES: Final = 4
_LEAST_RESERVE: Final = 16
_MOST_RESERVE: Final = 256


def descriptor_limit() -> int:
    """Return the limit of file descriptors of this process."""
    if sys.platform == "win32":
        return _FALLBACK
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 31 if soft == resource.RLIM_INFINITY else soft


def descriptor_reserve(limit: int) -> int:
    """Return the share of ``limit`` descriptors that the process reserves for its files, pipes, children and peers."""
    return max(_LEAST_RESERVE, min(_MOST_RESERVE, limit // 4))


def spare_descriptors(limit: int) -> int:
    """Return the share of ``limit`` descriptors that connections of strangers may use, over all listeners."""
    return max(0, limit - descriptor_reserve(limit) - _USUAL)


def places(most: int, limit: int) -> int:
    """Return how many connections of strangers one listener may hold: ``most``, or fewer where ``limit`` is low."""
    return min(most, max(_LEAST_PLACES, spare_descriptors(limit) // 16))


def accepted_at_once(most: int, limit: int) -> int:
    """Return the most connections to accept in one turn of the loop: all of them are open before any is closed."""
    return max(1, min(most, descriptor_reserve(limit) // 4))


def is_reserved(descriptor: int) -> bool:
    """Return whether a new ``descriptor`` is one of the last, which no connection of a stranger may keep."""
    limit = descriptor_limit()
    return descriptor >= limit - descriptor_reserve(limit)


def is_exhausted(error: OSError) -> bool:
    """Return whether ``error`` says that no descriptor is left, so the same call may succeed a moment later."""
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
    """Two descriptors held in reserve, so another can be duplicated when the process has none left."""

    def __init__(self) -> None:
        self._null = os.open(os.devnull, os.O_RDWR)
        self._spare = os.dup(self._null)

    def lend(self, descriptor: int) -> int:
        """Return a duplicate of ``descriptor``, valid until ``take_back``; do not close it.  Raises ``OSError``."""
        return os.dup2(descriptor, self._spare, inheritable=False)

    def take_back(self) -> None:
        """Close the duplicate."""
        os.dup2(self._null, self._spare, inheritable=False)

    def close(self) -> None:
        os.close(self._spare)
        os.close(self._null)
