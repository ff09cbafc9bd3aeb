"""Decide for one rank of asynchronous training when it may begin its next step.  Sans-I/O: feed events, obey commands.

Theory of operation.  A rank's clock counts the updates that it has made.  Updates arrive in order, so the last one to
arrive gives the progress of its rank, or a lower bound of it.  A rank may begin a step when it has made at most
``max_staleness`` more updates than the slowest is known to have made (stale synchronous parallel, Ho et al. 2013); so
it never runs a step that is more than ``max_staleness`` ahead of the one that another rank runs.

A rank that has run out of work *settles*: no rank waits for it from then on.  When all ranks settle, and all their
updates have arrived, the settlement is complete, and the next step of each rank counts as the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from asyncpar.errors import UsageError


@dataclass(frozen=True, slots=True)
class StepWanted:
    """This rank wants to begin a step."""


@dataclass(frozen=True, slots=True)
class StepUnwanted:
    """This rank no longer waits to begin a step."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """This rank has made an update."""


@dataclass(frozen=True, slots=True)
class PeerStepped:
    """All updates of ``rank`` up to number ``steps`` have arrived."""

    rank: int
    steps: int


@dataclass(frozen=True, slots=True)
class SettleWanted:
    """This rank has no more work until all have made the same progress."""


@dataclass(frozen=True, slots=True)
class PeerSettling:
    """``rank`` settles after ``steps`` updates."""

    rank: int
    steps: int


@dataclass(frozen=True, slots=True)
class Begin:
    """The wanted step may begin, after ``waited`` seconds."""

    waited: float


@dataclass(frozen=True, slots=True)
class AnnounceSettling:
    """Notify all others that this rank settles after ``steps`` updates."""

    steps: int


@dataclass(frozen=True, slots=True)
class Settled:
    """Every update of every rank has arrived."""


Event: TypeAlias = StepWanted | StepUnwanted | StepDone | PeerStepped | SettleWanted | PeerSettling
Command: TypeAlias = Begin | AnnounceSettling | Settled


class StalenessClock:
    """The clocks of all ranks as known to rank ``rank`` of ``size``.  ``max_staleness`` None: no rank ever waits."""

    def __init__(self, *, rank: int, size: int, max_staleness: int | None) -> None:
        if not 0 <= rank < size:
            raise UsageError(f"rank: expected 0..{size - 1}, got {rank}")
        if max_staleness is not None and max_staleness < 0:
            raise UsageError(f"max_staleness: expected 0 or more steps, or None, got {max_staleness}")
        self._rank = rank
        self._bound = max_staleness
        self._steps = [0] * size
        self._settled_at = [0] * size
        """The steps of each rank at the last settlement."""
        self._settling: dict[int, int] = {}
        self._wanted_at: float | None = None

    @property
    def steps(self) -> int:
        """Updates that this rank has made."""
        return self._steps[self._rank]

    def slowest(self) -> int | None:
        """Return the rank with the fewest updates among those that others may have to wait for."""
        rest = [rank for rank in range(len(self._steps)) if rank != self._rank and rank not in self._settling]
        return min(rest, key=self._progress, default=None)

    def staleness(self) -> int:
        """Return how many updates this rank is known to be ahead of the slowest."""
        slowest = self.slowest()
        return 0 if slowest is None else max(0, self._progress(self._rank) - self._progress(slowest))

    def handle(self, event: Event, now: float) -> list[Command]:
        """Process ``event`` at time ``now`` (seconds) and return the resulting commands."""
        match event:
            case StepWanted():
                self._want(now)
            case StepUnwanted():
                self._wanted_at = None
            case StepDone():
                self._steps[self._rank] += 1
            case PeerStepped(rank, steps):
                self._check_forward(rank, steps)
                self._steps[rank] = steps
            case SettleWanted():
                if self._wanted_at is not None or self._rank in self._settling:
                    raise UsageError("settle: this rank waits to begin a step, or settles already")
                self._settling[self._rank] = self.steps
                return [AnnounceSettling(self.steps), *self._advance(now)]
            case PeerSettling(rank, steps):
                self._check_forward(rank, steps)
                self._settling[rank] = steps
        return self._advance(now)

    def _want(self, now: float) -> None:
        if self._wanted_at is not None or self._rank in self._settling:
            raise UsageError("step: this rank waits to begin a step already, or settles")
        self._wanted_at = now

    def _advance(self, now: float) -> list[Command]:
        if self._wanted_at is not None and (self._bound is None or self.staleness() <= self._bound):
            waited, self._wanted_at = now - self._wanted_at, None
            return [Begin(waited)]
        if len(self._settling) == len(self._steps) and all(
            self._steps[rank] == steps for rank, steps in self._settling.items()
        ):
            self._settled_at = list(self._steps)
            self._settling = {}
            return [Settled()]
        return []

    def _progress(self, rank: int) -> int:
        return self._steps[rank] - self._settled_at[rank]

    def _check_forward(self, rank: int, steps: int) -> None:
        assert rank != self._rank, "what this rank does is no news of a peer"
        assert steps >= self._steps[rank], "updates of a rank arrive in order"
