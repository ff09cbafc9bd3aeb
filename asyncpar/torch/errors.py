"""Errors that are asyncpar's and torch's at the same time.

Programs for torch catch ``RuntimeError`` or ``torch.distributed.DistBackendError``; those for asyncpar ``PeerLost`` and
its like.  What the backend raises is both.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch.distributed as dist

from asyncpar.errors import AsyncparError, PeerTimeout, UsageError

E = TypeVar("E", bound=BaseException)

_TIMEOUT = "timeout"


def as_torch(error: E, operation: str = "") -> E:
    """Return ``error`` as one that is also a ``DistBackendError``, with the same attributes, caused by the original.

    What is not an error of asyncpar, or is torch's already, stays as it is.  A ``UsageError`` names an argument: before
    it comes the ``operation``.  The message of a ``PeerTimeout`` has the word "timeout" in it, which is how programs
    for torch know it.
    """
    if not isinstance(error, AsyncparError) or isinstance(error, dist.DistBackendError):
        return error
    kind = _both(type(error))
    both: Any = kind.__new__(kind)
    both.args = error.args
    if operation and type(error) is UsageError:
        both.args = (f"{operation}: {error}",)
    if isinstance(error, PeerTimeout) and _TIMEOUT not in str(error):
        both.args = (f"{error}; the {_TIMEOUT} is over",)
    both.__dict__.update(error.__dict__)
    both.__cause__ = error
    return cast("E", both)


def _both(kind: type[AsyncparError]) -> type[AsyncparError]:
    """Return the class that is ``kind`` and torch's: one for each kind, so that it can be caught."""
    both = _made.get(kind)
    if both is None:
        both = type(kind.__name__, (kind, dist.DistBackendError), {"__module__": __name__, "__doc__": kind.__doc__})
        both = _made.setdefault(kind, both)
    return both


_made: dict[type[AsyncparError], type[AsyncparError]] = {}
