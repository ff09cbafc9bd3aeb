"""Descriptors that this process has open: what a test may have left, whatever other threads do meanwhile."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress

_SHARED = ("/memfd:", "/dev/shm/")


def open_descriptors() -> Counter[str]:
    """Return how many descriptors refer to each pipe, socket, piece of shared memory, and to the standard input.

    Other files are left out: threads that watch the process open some for a moment.
    """
    found = Counter[str]()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the folder
            found[os.readlink(f"/proc/self/fd/{name}")] += 1
    own = os.readlink("/proc/self/fd/0")
    is_counted = {target: target == own or not target.startswith("/") or target.startswith(_SHARED) for target in found}
    return Counter({target: count for target, count in found.items() if is_counted[target]})
