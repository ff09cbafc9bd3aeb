"""Messages of a rank and its agent over the rank's pipe, translated for the leader.  Pure."""

from __future__ import annotations

from typing import assert_never

from asyncpar.hosts.messages import (
    HostEvent,
    MemberArrived,
    MemberDied,
    MemberFailed,
    MemberLeft,
    MemberProgressed,
    MemberReady,
    MemberReported,
    MemberWithdrawn,
    WorldAnnounced,
)
from asyncpar.hosts.pipe_messages import (
    DonorsWanted,
    JoinWorld,
    LeaseWanted,
    LeaveJob,
    LeaveWanted,
    LinksServed,
    NotAdmitted,
    RankMessage,
    StateReached,
    Withdraw,
    WorldFormed,
    WorldReport,
)
from asyncpar.net.security.identity import role_in


def event_for_leader(member: str, host: str, message: RankMessage) -> HostEvent | None:
    """Translate ``message`` of ``member`` for the leader; None for messages that the host handles by itself."""
    match message:
        case JoinWorld(lineage, address, settings):
            ordered = tuple(sorted(settings))
            return MemberArrived(member=member, host=host, lineage=lineage, settings=ordered, address=address)
        case StateReached(lineage):
            return MemberProgressed(member, lineage)
        case Withdraw():
            return MemberWithdrawn(member)
        case LinksServed(generation, address):
            return MemberReady(member, generation, address)
        case WorldReport(report):
            return MemberReported(member=member, report=report)
        case LeaveJob(failed, why) if failed is not None:
            return MemberFailed(member, failed, why)
        case LeaveJob(why=why) if why:  # it failed outside a step: it is not done
            return MemberDied(member, f"ended with {why}")
        case LeaveJob():
            return MemberLeft(member)
        case DonorsWanted() | NotAdmitted() | LeaseWanted() | LeaveWanted():
            return None
    assert_never(message)


def world_for_rank(announced: WorldAnnounced, member: str, *, job: str) -> WorldFormed | None:
    """Describe the new world to ``member``; None if it has no place there."""
    names = [placed.name for placed in announced.members]
    if member not in names:
        return None
    return WorldFormed(
        generation=announced.generation,
        rank=names.index(member),
        hosts=tuple(placed.host for placed in announced.members),
        job=job,
        lineage=announced.lineage,
        decision=announced.decision,
        change=announced.change,
        certified=_certified(names),
    )


def _certified(names: list[str]) -> tuple[int, ...] | None:
    """Return the numbers in the certificates of members, None if they have none."""
    roles = [role_in(name) for name in names]
    numbers = tuple(role.number for role in roles if role is not None and role.number is not None)
    return numbers if len(numbers) == len(names) else None
