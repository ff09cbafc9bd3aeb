"""The other ranks that hold a parameter, as gradient synchronization needs to know them.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Replication(StrEnum):
    """The part of the gradient that each tensor-parallel rank computes for a parameter of which it holds a full copy.

    WHOLE: all of it, so copies are averaged to keep them equal.  PARTIAL: a part of the sum, as with a split sequence,
    so parts are added.
    """

    WHOLE = "whole"
    PARTIAL = "partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The placement of a parameter.

    ``replicated`` None: each tensor-parallel rank holds a slice of its own, which must never be added to another's.
    ``tied`` names a tensor shared by the first and the last pipeline stage, such as an embedding that is also the head;
    parts of its gradient come from both, and are added.
    """

    replicated: Replication | None = None
    tied: str | None = None

    def __str__(self) -> str:
        parts = [] if self.replicated is None else [f"replicated ({self.replicated})"]
        return ", ".join(parts if self.tied is None else [*parts, f"tied as {self.tied}"])


UNPLACED = Placement()
"""The placement without tensor and pipeline parallelism."""


def is_frozen(parameter: object) -> bool:
    """Return whether ``parameter`` is currently constant: whether it has a false ``requires_grad``."""
    return not getattr(parameter, "requires_grad", True)
