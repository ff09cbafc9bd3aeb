"""How far apart ranks may run."""

from __future__ import annotations

from typing import ClassVar

from asyncpar.core.records import dataclass
from asyncpar.errors import UsageError


@dataclass(frozen=True, slots=True)
class SynchronizationMode:
    """``max_staleness`` is the number of steps that a rank may run ahead of the slowest; None: any number.

    ``SYNCHRONOUS`` (0): gradients are averaged before each update, so all ranks hold the same parameters at every step.
    ``ASYNCHRONOUS`` (None): no rank waits for another.  Each applies its own update at once, those of others when they
    arrive, all of them weighted by 1 / ranks.
    ``BOUNDED_STALENESS(n)``: as asynchronous, but a rank that is ``n`` steps ahead of the slowest waits for it (stale
    synchronous parallel, Ho et al. 2013).  With 0 that is synchronous.
    """

    max_staleness: int | None

    SYNCHRONOUS: ClassVar[SynchronizationMode]
    ASYNCHRONOUS: ClassVar[SynchronizationMode]

    def __post_init__(self) -> None:
        if self.max_staleness is not None and self.max_staleness < 0:
            raise UsageError(f"max_staleness: expected 0 or more steps, or None, got {self.max_staleness}")

    @classmethod
    def BOUNDED_STALENESS(cls, max_staleness: int) -> SynchronizationMode:  # noqa: N802
        """Return the mode in which no rank runs more than ``max_staleness`` steps ahead of another."""
        return cls(max_staleness)

    @property
    def is_synchronous(self) -> bool:
        """Are gradients averaged, rather than updates exchanged?"""
        return self.max_staleness == 0

    def __str__(self) -> str:
        if self.max_staleness is None:
            return "asynchronous"
        return "synchronous" if self.is_synchronous else f"bounded staleness {self.max_staleness}"


SynchronizationMode.SYNCHRONOUS = SynchronizationMode(0)
SynchronizationMode.ASYNCHRONOUS = SynchronizationMode(None)
