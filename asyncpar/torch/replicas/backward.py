"""The end of a backward pass, successful or not.

Autograd runs the callbacks queued in a pass when the pass is done, and only then.  It drops the callbacks of a pass
that an exception ends; so an object that is freed before it was called reports that at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import ParamSpec, Protocol

import torch

from asyncpar.errors import PeerCancelled

P = ParamSpec("P")


class Waitable(Protocol):
    """Something in progress: an operation, or a bucket that a hook reduces."""

    def wait(self) -> bool:
        """Wait until it is over and raise its error."""
        ...


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


def weakly(method: Callable[P, None]) -> Callable[P, None]:
    """Return a function that calls ``method`` without keeping its object, and does nothing once that is gone."""
    kept = weakref.WeakMethod(method)

    def call(*arguments: P.args, **settings: P.kwargs) -> None:
        found = kept()
        if found is not None:
            found(*arguments, **settings)

    return call


def wait_for_all(works: Sequence[Waitable]) -> None:
    """Wait for all works, then raise the most informative error."""
    errors: list[BaseException] = []
    for work in works:
        try:
            work.wait()
        except Exception as error:  # noqa: BLE001  # raised below, when nothing is under way any more
            errors.append(error)
    if errors:
        raise min(errors, key=lambda error: isinstance(error, PeerCancelled))
