"""What ranks tell each other before they run a pipeline, and whether it fits together.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What one rank is about to do, by the executor ``name``: ``problem`` says why it cannot.

    ``attempt`` is larger than that of earlier runs if the last one failed here: messages of it may be under way.
    """

    name: str
    method: str
    schedule: str
    micro_batches: int
    digest: str
    attempt: int
    problem: str | None

    @property
    def plan(self) -> str:
        """What must be equal on all ranks, in words."""
        what = f"{self.method} of {self.schedule}, {self.micro_batches} micro-batches"
        return f"{what} (digest {self.digest}) by {self.name!r}"


def find_mismatch(openings: Sequence[Opening], ranks: Sequence[int]) -> str | None:
    """Return what does not fit together, None if all does; ``ranks`` are the numbers to use in the message."""
    plans = [opening.plan for opening in openings]
    common, _ = Counter(plans).most_common(1)[0]
    different = [f"rank {rank} has {plan}" for rank, plan in zip(ranks, plans, strict=True) if plan != common]
    if different:
        others = [str(rank) for rank, plan in zip(ranks, plans, strict=True) if plan == common]
        who = "rank" if len(others) == 1 else "ranks"
        return (
            f"schedule: expected the same on all ranks, but {'; '.join(different)}; {who} {', '.join(others)}: {common}"
        )
    problems = [f"rank {rank}: {one.problem}" for rank, one in zip(ranks, openings, strict=True) if one.problem]
    return "; ".join(problems) or None
