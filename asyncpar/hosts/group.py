"""The state that agents agree on, what a host reports until it is in that, and whose silence counts as a loss.  Pure.

The committed state of ranks is in the memory of members.  So a host is declared lost after a short silence only while
another one that holds it is heard from; the last holders are waited for, since a pause is not a death.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from asyncpar.hosts.consensus_messages import MOST_VOTERS
from asyncpar.hosts.messages import (
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
    WorldAnnounced,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNode:
    """An agent of the group: ``node`` is one start of it, ``name`` that of its host; it serves at ``address``.

    A witness votes, but runs no ranks.
    """

    node: str
    name: str
    address: str
    is_witness: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """The state on which the group agrees.  ``generation`` is that of the next world."""

    nodes: tuple[GroupNode, ...]
    job: JobOpened | None = None
    closed: JobClosed | None = None
    world: WorldAnnounced | None = None
    generation: int = 0

    @property
    def is_job_open(self) -> bool:
        return self.job is not None and (self.closed is None or self.closed.number < self.job.number)

    def named(self, name: str) -> GroupNode | None:
        """Return the agent of a host."""
        return next((node for node in self.nodes if node.name == name), None)


def choose_voters(
    state: GroupState, before: Iterable[str], leader: str, heard: Callable[[str], bool] = bool
) -> tuple[str, ...]:
    """Return the voters for the next change: the leader first, then previous voters, then others, up to five.

    The others are only nodes that were ``heard`` from, if any was: one that was admitted and never began would be
    missing in every quorum.

    Witnesses come last: of two voters the first goes on, and a job needs a host that has ranks.  One of them votes,
    however many hosts there are.
    """
    present = {node.node: node.is_witness for node in state.nodes}
    known = dict.fromkeys((leader, *before))
    wanted = [node for node in dict.fromkeys((*known, *present)) if node in present and (node in known or heard(node))]
    wanted = wanted or list(present)
    witnesses = [node for node in wanted if present[node]]
    hosts = [node for node in wanted if not present[node]][: MOST_VOTERS - min(len(witnesses), 1)]
    return tuple(hosts + witnesses)[:MOST_VOTERS]


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


SILENT_SECONDS = 2.5
"""Seconds without an answer after which the leader declares an agent lost."""
LAST_HOLDER_SECONDS = 30.0
"""The same if no other holder of the state is heard from: then it is lost with this host."""
QUIET_SECONDS = 1.0
"""Seconds without an answer after which nobody relies on an agent, which need not be lost."""
PARKED_SECONDS = 2.1
"""Seconds without confirmation that a leader hears from it after which an agent parks.

It parks before it can be declared lost.
"""
_REFUSED_SECONDS = 0.25
"""Seconds for which nobody accepts connections at an agent's address, after which it is declared lost."""
_ELECTION_SECONDS = 1.0
"""Seconds of a leader's silence that an election proves, at least (see ``ElectionTimes``)."""


class AgentSilence:
    """The times at which each agent was last heard from."""

    def __init__(self) -> None:
        self._answered: dict[str, float] = {}
        self._refused: dict[str, float] = {}
        self._speakers: set[str] = set()
        self._present: set[str] = set()
        """Agents heard from since this agent leads."""

    def has_responded(self, node: str) -> bool:
        """Return whether ``node`` was ever heard from."""
        return node in self._speakers

    def heard(self, node: str, now: float) -> None:
        """Record that ``node`` was heard from."""
        self._answered[node] = now
        self._speakers.add(node)
        self._present.add(node)
        self._refused.pop(node, None)

    def connects(self, node: str, now: float) -> None:
        """Record that a connection to ``node`` is to be made."""
        self._answered[node] = now

    def accepts(self, node: str) -> None:
        """Record that there is a connection to ``node``: earlier refusals were of another start of it."""
        self._refused.pop(node, None)

    def refused(self, node: str, now: float) -> None:
        """Record that nobody accepts connections at the address of ``node``."""
        self._refused.setdefault(node, now)

    def is_gone(self, node: str) -> bool:
        """Decide whether nobody accepts connections at the address of ``node``."""
        return node in self._refused

    def forget(self, node: str) -> None:
        """Forget ``node``, which is no longer in the group."""
        self._answered.pop(node, None)
        self._speakers.discard(node)
        self._present.discard(node)
        self._refused.pop(node, None)

    def begin(self, nodes: Iterable[str], now: float, *, before: str | None) -> None:
        """Count from now on, as the leader after ``before``, which has already been silent for an election."""
        self._present.clear()
        heard = self._answered.get(before, now) if before is not None else now
        self._answered = dict.fromkeys(nodes, now)
        if before in self._answered:
            self._answered[before] = max(heard, now - _ELECTION_SECONDS)

    def is_quiet(self, node: str, now: float) -> bool:
        """Decide whether ``node`` has been silent recently, or since this agent leads."""
        return node not in self._present or now - self._answered.get(node, now) > QUIET_SECONDS

    def lost(self, state: GroupState, holders: frozenset[str], now: float, *, own: str = "") -> list[tuple[str, str]]:
        """Return the nodes of ``state`` that are declared lost, each with the reason.

        ``holders`` are the hosts that have the committed state; ``own`` is the node of this agent.
        """
        heard = {node.name for node in state.nodes if node.node == own or not self.is_quiet(node.node, now)}
        found = []
        for node in state.nodes:
            is_last = node.name in holders and not holders & heard
            patience = LAST_HOLDER_SECONDS if is_last else SILENT_SECONDS
            if now - self._refused.get(node.node, now) > _REFUSED_SECONDS:
                found.append((node.node, "its agent is gone"))
            elif now - self._answered.get(node.node, now) > patience:
                found.append((node.node, f"its agent did not answer for {patience:g} s"))
        return found
