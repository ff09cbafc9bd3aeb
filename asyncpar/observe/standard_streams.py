"""Descriptors 0, 1 and 2, as a parent may leave them: closed."""

from __future__ import annotations

import os


def open_closed_streams() -> None:
    """Open the null device on each of the descriptors 0, 1 and 2 that is closed.

    Else the next file or socket gets that number: libuv aborts the process over it (``uv__close``), and what a child
    prints ends up in it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
