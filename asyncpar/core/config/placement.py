"""The other ranks that hold a parameter, as gradient synchronization must know them.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Replication(StrEnum):
    """Part of the gradient that each tensor-parallel rank computes for a parameter of which it holds a whole copy.

    WHOLE: all of it, so copies are averaged to keep them equal.  PARTIAL: a part of the sum, as where the sequence
    is split, so parts are added.
    """

    WHOLE = "whole"
    PARTIAL = "partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """``replicated`` None: a slice of its own on every tensor-parallel rank, which must never be added to another's.

    ``tied`` names a tensor that the first and the last pipeline stage share, such as an embedding that is the head,
    too; parts of its gradient come from both, and are added.
    """

    replicated: Replication | None = None
    tied: str | None = None

    def __str__(self) -> str:
        parts = [] if self.replicated is None else [f"replicated ({self.replicated})"]
        return ", ".join(parts if self.tied is None else [*parts, f"tied as {self.tied}"])


UNPLACED = Placement()
"""Where there is neither tensor nor pipeline parallelism."""


def is_frozen(parameter: object) -> bool:
    """Decide whether ``parameter`` is a constant for now: whether it has a ``requires_grad`` that is false."""
    return not getattr(parameter, "requires_grad", True)
