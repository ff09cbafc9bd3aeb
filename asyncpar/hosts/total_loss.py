"""Decisions on a job that has lost all its members, and with them its state.  Pure.

Members keep the state in their memory alone, so a job that has lost all of them has only what its program has saved, if
anything.  Whether it has is seen from the state of arriving members: one that goes on from a checkpoint has another
state than the job's initial one.  Agents count the committed steps, of which they are notified once a second or two; so
the count is a lower bound, but a missing count means that nothing was committed.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

import msgspec

from asyncpar.hosts.lineage import Lineage
from asyncpar.hosts.messages import WorldAnnounced

ALL_LOST: Final = "all members are lost"
UNKNOWN: Final = -1
"""The count of committed steps of a member that never asked to commit."""


class OnTotalLoss(StrEnum):
    """The policy of a job when all its members are lost."""

    CHECKPOINT = "checkpoint"
    """Go on if the program begins from a checkpoint, else end."""
    RESTART = "restart"
    FAIL = "fail"


def with_origin(world: WorldAnnounced, before: WorldAnnounced | None) -> WorldAnnounced:
    """Return ``world``, which follows ``before``, with the lineage of the job's initial state."""
    origin = world.lineage if before is None or before.origin is None else before.origin
    return msgspec.structs.replace(world, origin=origin)


def refuse_to_begin_anew(policy: str, steps: int) -> str:
    """Return the reason why the job ends after all members were lost; "" if it may go on with new ones."""
    return f"{_lost(steps)} (--on-total-loss fail)" if policy == OnTotalLoss.FAIL and steps != UNKNOWN else ""


def refuse_to_begin_with(policy: str, last: WorldAnnounced | None, arrived: Iterable[Lineage]) -> str:
    """Return the reason why members that have ``arrived`` may not make a world after ``last``; "" if they may."""
    if policy != OnTotalLoss.CHECKPOINT or last is None or last.lineage.step == UNKNOWN:
        return ""
    if all(lineage != last.origin for lineage in arrived):
        return ""
    return (
        f"{_lost(last.lineage.step)}; the program begins with the state that the job began with, not from a "
        "checkpoint: have it save and load one, or let the job begin anew with --on-total-loss restart"
    )


def _lost(steps: int) -> str:
    count = f"at least {steps} committed step{'s' if steps != 1 else ''}" if steps > 0 else "its first committed steps"
    return f"{ALL_LOST}, and with them {count}"
