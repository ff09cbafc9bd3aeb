"""How actors end, as others hear of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from asyncpar.errors import AsyncparError
from asyncpar.runtime.ref import ActorRef


class DownReason(enum.StrEnum):
    """Why an actor is gone."""

    STOPPED = "stopped"
    """It was stopped, or left, in good order."""
    FAILED = "failed"
    """It failed: see ``Actor`` for what counts as a failure."""
    KILLED = "killed"
    """It was killed."""
    CLOSED = "closed"
    """Its node was closed."""
    LOST = "lost"
    """Its rank is gone."""
    MISSING = "missing"
    """There was no such actor."""


@dataclass(frozen=True, slots=True)
class Down:
    """An actor is gone.  ``error`` says what went wrong: ``RemoteError`` if it failed, ``PeerLost`` if it was lost."""

    ref: ActorRef[Any]
    reason: DownReason
    error: AsyncparError | None = None
