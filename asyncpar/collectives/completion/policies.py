"""Policies that define when an operation is complete, options for late parts, and the result."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from asyncpar.collectives.arrays import Array
from asyncpar.errors import UsageError

ALL: Final = "all"

Late: TypeAlias = Literal["drop", "next"]
"""Use of a late part: none, or it is added to the next part of its rank."""


@dataclass(frozen=True, slots=True)
class Quorum:
    """Complete an operation when ``fraction`` of the ranks are present (rounded up, more than 0, at most 1).

    Each rank waits ``wait`` seconds, from its call on, for more of them.
    """

    fraction: float
    wait: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction <= 1.0:
            raise UsageError(f"fraction: expected a number above 0 and up to 1, got {self.fraction!r}")
        _check_seconds("wait", self.wait)


@dataclass(frozen=True, slots=True)
class Deadline:
    """Complete an operation when all ranks are present, or with those present ``seconds`` after a call.

    At least the fraction ``at_least`` of the ranks must be present; the operation waits for that.
    """

    seconds: float
    at_least: float = 0.0

    def __post_init__(self) -> None:
        _check_seconds("seconds", self.seconds)
        if not 0.0 <= self.at_least <= 1.0:
            raise UsageError(f"at_least: expected a number from 0 to 1, got {self.at_least!r}")


Until: TypeAlias = Quorum | Deadline


class WantedRanks(NamedTuple):
    """Number of ranks that are needed, and the seconds of waiting for more."""

    need: int
    wait: float


def wanted(until: Until, size: int) -> WantedRanks:
    """Return the requirements of ``until`` in a group of ``size``."""
    match until:
        case Quorum(fraction, wait):
            return WantedRanks(max(1, math.ceil(fraction * size - 1e-9)), wait)
        case Deadline(seconds, at_least):
            return WantedRanks(max(1, math.ceil(at_least * size - 1e-9)), seconds)


def check_policy(until: object, late: object, op: str) -> Until:
    """Return ``until``; raise unless it is a policy, and compatible with the other options."""
    if not isinstance(until, Quorum | Deadline):
        raise UsageError(f'until: expected "all", a Quorum or a Deadline, got {until!r}')
    if late not in ("drop", "next"):
        raise UsageError(f'late: expected "drop" or "next", got {late!r}')
    if late == "next" and op not in ("sum", "mean"):
        raise UsageError(f'late: "next" adds parts, which is for sum and mean; use "drop" with {op}')
    return until


def _check_seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < math.inf:
        raise UsageError(f"{name}: expected seconds, 0 or more, got {value!r}")


@dataclass(frozen=True, slots=True, eq=False)
class Reduced:
    """The result of an all-reduce with a policy: ``values``, and the ranks of the group that have contributed to it.

    Both are the same on all ranks, to the last bit.  ``was_late`` means that this rank's part is not in it.  ``behind``
    is the number of later operations of the series known to be decided without this rank, which need not compute for
    them.
    """

    values: Array
    contributors: tuple[int, ...]
    size: int
    was_late: bool
    behind: int

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have contributed."""
        return len(self.contributors) == self.size

    @property
    def share(self) -> float:
        """The fraction of ranks that have contributed: a sum divided by it estimates the sum over all ranks."""
        return len(self.contributors) / self.size


class LateCounts(NamedTuple):
    """Counts of this rank's parts, by their use, in one series of operations with a policy.

    Of ``calls`` with a result, ``complete`` had the parts of all ranks; ``late`` were without this rank's part, which
    was added to its next part in ``carried`` of them, and lost in ``dropped``.
    """

    calls: int = 0
    complete: int = 0
    late: int = 0
    carried: int = 0
    dropped: int = 0
