"""The end of a backward pass, good or bad.

Autograd calls what is queued in a pass when it is through, and only then.  It drops what is queued in a pass that an
exception ends; so an object that is freed before it was called tells of that at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class PassEnd:
    """Calls ``end`` at the end of the backward pass of this thread, or ``lose`` if an exception ends the pass.

    Autograd holds the only reference to it.
    """

    __slots__ = ("__weakref__", "_end", "_lose")

    def __init__(self, end: Callable[[], None], lose: Callable[[], None]) -> None:
        self._end = end
        self._lose: Callable[[], None] | None = lose
        torch.autograd.Variable._execution_engine.queue_callback(self)

    def __call__(self) -> None:
        self._lose = None
        self._end()

    def __del__(self) -> None:
        if self._lose is not None:
            self._lose()
