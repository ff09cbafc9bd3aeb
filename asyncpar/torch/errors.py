"""Errors of the backend, each both of asyncpar and a ``torch.distributed.DistBackendError`` (a ``RuntimeError``)."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch.distributed as dist

from asyncpar.errors import AsyncparError, PeerTimeout, UsageError

E = TypeVar("E", bound=BaseException)

_TIMEOUT = "timeout"


def as_torch(error: E, operation: str = "") -> E:
    """Return ``error`` as one that is also a ``DistBackendError``, with the same attributes, caused by the original.

    Other errors, and those that are torch's already, are returned unchanged.  ``operation`` is prepended to the message
    of a ``UsageError``, which names an argument.  The message of a ``PeerTimeout`` contains the word "timeout", by
    which programs for torch recognize it.
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
    """Return the class that inherits from ``kind`` and torch's error; there is one for each kind."""
    both = _made.get(kind)
    if both is None:
        both = type(kind.__name__, (kind, dist.DistBackendError), {"__module__": __name__, "__doc__": kind.__doc__})
        both = _made.setdefault(kind, both)
    return both


_made: dict[type[AsyncparError], type[AsyncparError]] = {}
