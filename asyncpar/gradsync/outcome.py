"""What became of a step whose gradients were not all finite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketOutcome:
    """What became of one bucket: the same on all replicas.

    ``culprits`` are the ranks that brought NaN or infinity, with the names of the parameters.  ``lost`` says which
    bucket it is whose mean cannot be had; it is empty if it can.
    """

    culprits: Mapping[int, Sequence[str]] = field(default_factory=dict)
    contributors: int
    lost: str = ""


class Findings(msgspec.Struct, frozen=True):
    """What the replicas of one group know of a step: who brought what, and the buckets whose mean cannot be had."""

    culprits: dict[int, list[str]]
    lost: list[str]


@dataclass(slots=True)
class StepOutcome:
    """What became of a step; complete when its block has been left.

    ``is_skipped``: gradients are as they were, because some were not finite (``NonFinitePolicy.SKIP_STEP``).
    ``culprits``: which ranks of the world had which parameters NaN or infinite, if any.  ``lost`` are the buckets whose
    means cannot be had, ``text`` says why, and is empty if they can.
    """

    is_skipped: bool = False
    culprits: dict[int, list[str]] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    text: str = ""

    def add(self, findings: Iterable[Findings]) -> None:
        """Take in what groups of replicas found, some more than once.

        Where nobody brought anything, finite values had an infinite sum.
        """
        for finding in findings:
            for rank, names in finding.culprits.items():
                known = self.culprits.setdefault(rank, [])
                known += [name for name in names if name not in known]
            self.lost += [name for name in finding.lost if name not in self.lost]
        who = [
            f"rank {rank} has NaN or infinity in {', '.join(names)}" for rank, names in sorted(self.culprits.items())
        ]
        if self.lost:
            self.text = "; ".join(who) or f"the sum over ranks overflowed in {', '.join(self.lost)}"


def collect(outcomes: Iterable[BucketOutcome]) -> Findings:
    """Return what the replicas know of all buckets together."""
    culprits: dict[int, list[str]] = {}
    lost: list[str] = []
    for outcome in outcomes:
        for rank, names in outcome.culprits.items():
            culprits.setdefault(rank, []).extend(names)
        lost += [outcome.lost] if outcome.lost else []
    return Findings(culprits, lost)
