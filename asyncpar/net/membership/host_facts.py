"""The facts that a host reports to its leader: kept while they matter, and resent to every new leader.  Pure."""

from __future__ import annotations

import msgspec

from asyncpar.net.membership.group_state import GroupState
from asyncpar.net.membership.world_messages import (
    HostDraining,
    HostEvent,
    HostLeaving,
    JobClosed,
    JobOpened,
    MemberArrived,
    MemberDied,
    MemberDraining,
    MemberFailed,
    MemberHealing,
    MemberLeft,
    MemberNotice,
    MemberProgressed,
    MemberReady,
    MemberReported,
    MemberResumed,
    MemberStopped,
    MemberWithdrawn,
)

_MOST_ENDS = 256
"""Most ends of members that are kept: a leader may know a member that no world has had."""


class HostFacts:
    """Facts in the order of their arrival; each may be reported any number of times."""

    def __init__(self) -> None:
        self._facts: dict[tuple[str, str], HostEvent] = {}
        self._ends: dict[str, HostEvent] = {}

    def note(self, event: HostEvent) -> None:
        """Store ``event``, in place of those that it supersedes."""
        match event:
            case JobOpened(number=number) | JobClosed(number=number):
                self._facts[type(event).__name__, str(number)] = event
            case HostDraining() | HostLeaving():
                self._facts[type(event).__name__, ""] = event
            case MemberHealing(member):
                self._facts["healing", member] = event
            case MemberArrived():
                self._facts.pop(("healing", event.member), None)
                self._facts.pop(("withdrawn", event.member), None)
                self._facts["arrived", event.member] = event
            case MemberProgressed(member, lineage):
                arrived = self._facts.get(("arrived", member))
                if isinstance(arrived, MemberArrived):
                    self._facts["arrived", member] = msgspec.structs.replace(arrived, lineage=lineage)
                    self._facts["progressed", member] = event
            case MemberWithdrawn(member):
                self._forget(member)
                self._facts["withdrawn", member] = event
            case MemberStopped(member) | MemberResumed(member):
                self._facts["stopped", member] = event
            case MemberReady() | MemberReported() | MemberDraining() | MemberNotice():
                kind = f"notice: {event.name}" if isinstance(event, MemberNotice) else type(event).__name__
                self._facts[kind, event.member] = event
            case MemberLeft(member) | MemberFailed(member, _, _) | MemberDied(member=member):
                self._forget(member)
                self._ends.setdefault(member, event)
                while len(self._ends) > _MOST_ENDS:
                    del self._ends[next(iter(self._ends))]

    def _forget(self, member: str) -> None:
        for key in [key for key in self._facts if key[1] == member]:
            del self._facts[key]

    def prune(self, state: GroupState) -> None:
        """Forget facts that the decided ``state`` includes."""
        opened = 0 if state.job is None else state.job.number
        closed = 0 if state.closed is None else state.closed.number
        names = () if state.world is None else [member.name for member in state.world.members]
        self._facts = {
            key: event for key, event in self._facts.items() if not _is_settled(event, opened, closed, names, state)
        }

    def all(self) -> list[HostEvent]:
        """Return all facts that a leader may not know."""
        return [*self._ends.values(), *self._facts.values()]


def _is_settled(
    event: HostEvent, opened: int, closed: int, members: list[str] | tuple[str, ...], state: GroupState
) -> bool:
    match event:
        case JobOpened(number=number):
            return number <= opened
        case JobClosed(number=number):
            return number <= closed
        case MemberHealing() | MemberArrived() | MemberProgressed() | MemberWithdrawn():
            return event.member in members and not isinstance(event, MemberWithdrawn)
        case MemberStopped() | MemberResumed():
            return event.member not in members
        case MemberReady(generation=generation) | MemberNotice(generation=generation):
            return generation < state.generation - 1
        case MemberReported(report=report):
            return report.generation < state.generation - 1
    return False
