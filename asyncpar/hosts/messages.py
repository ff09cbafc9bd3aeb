"""Messages between the agents of a group and their leader about jobs, members and worlds.  Pure values.

A *member* is one start of one process, by a name that is never reused: ``host/slot/incarnation``.  Hosts report to the
leader the events of their members, and receive its decisions, each once and in order.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

import msgspec

from asyncpar.hosts.lineage import Decision, Lineage, MemberReport


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldChange:
    """The difference of a world from the previous one: members that joined and left, by name, and why.

    ``is_by_loss``: a member declared another lost, which need not have left: a connection may break once.
    """

    generation: int
    joined: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    why: str = ""
    is_by_loss: bool = False

    def __str__(self) -> str:
        parts = [f"generation {self.generation}"]
        parts += [f"joined: {', '.join(self.joined)}"] if self.joined else []
        parts += [f"left: {', '.join(self.left)}"] if self.left else []
        return "; ".join(parts + ([self.why] if self.why else []))


class PlacedMember(msgspec.Struct, frozen=True, kw_only=True):
    """A member of a world; ``address`` is where newcomers request its state."""

    name: str
    host: str
    address: str = ""


class WorldTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a job for the leader: it begins with ``most_hosts``, or with ``least_hosts`` after ``last_call``.

    It never has more than ``most_hosts``: others wait until one of them is lost or leaves.  Each host has ``members``
    members.  Times are in seconds: ``report_within`` is the time from the end of a world within which members must
    report, or they are declared lost.
    """

    least_hosts: int
    most_hosts: int
    members: int
    last_call: float = 5.0
    report_within: float = 10.0
    wait_within: float | None = None
    """Seconds for which the job waits for ``least_hosts``, before it ends; None: as long as they take."""
    on_total_loss: str = "restart"
    """See ``OnTotalLoss``."""


# Reports of a host to the leader.


class JobOpened(msgspec.Struct, frozen=True, kw_only=True):
    """Job ``number`` begins; for the leader: if no job is open, and the last one was ``number - 1``.

    ``record`` is for the hosts: what to run, and how.
    """

    number: int
    terms: WorldTerms
    record: bytes


class JobClosed(msgspec.Struct, frozen=True, kw_only=True):
    """Job ``number`` is over: no member joins it any more, and its world does not change without a fault.

    ``record`` is for the hosts: the reason, and its exit code.  Members end by themselves, or because their hosts end
    them.
    """

    number: int
    record: bytes


class MemberArrived(msgspec.Struct, frozen=True, kw_only=True):
    """``member`` waits for its first world, with ``lineage``, and serves its state to others at ``address``.

    ``settings``, by name, are equal in all members.  ``place`` is the place that its host asks for in the first world;
    hosts that ask for none come last.
    """

    member: str
    host: str
    lineage: Lineage
    settings: tuple[tuple[str, str], ...] = ()
    address: str = ""
    place: int | None = None


class MemberHealing(msgspec.Struct, frozen=True):
    """``member`` fetches the state from members of a world; it arrives when it has it."""

    member: str
    host: str


class MemberProgressed(msgspec.Struct, frozen=True):
    """``member`` waits, and has reached ``lineage``."""

    member: str
    lineage: Lineage


class MemberWithdrawn(msgspec.Struct, frozen=True):
    """``member`` no longer waits: its healing begins anew; it may arrive again."""

    member: str


class MemberReady(msgspec.Struct, frozen=True):
    """``member`` is reachable at ``address`` in the announced world of ``generation``."""

    member: str
    generation: int
    address: str


class MemberReported(msgspec.Struct, frozen=True, kw_only=True):
    """``member`` has left the world of ``report.generation``; ``why``, if it is the first and no member is lost."""

    member: str
    report: MemberReport
    why: str = ""


class MemberStopped(msgspec.Struct, frozen=True):
    """The process of ``member`` is stopped, or runs no Python code: ``how``.  It has its state, and may go on."""

    member: str
    how: str


class MemberResumed(msgspec.Struct, frozen=True):
    """The process of ``member``, which was stopped, has resumed."""

    member: str


class MemberDraining(msgspec.Struct, frozen=True):
    """``member`` was asked to end, and is to leave at the end of a step."""

    member: str


class MemberLeft(msgspec.Struct, frozen=True):
    """``member`` needs no more worlds: it is done."""

    member: str


class MemberFailed(msgspec.Struct, frozen=True):
    """The program of ``member`` has raised in ``step``, and leaves because of ``why``."""

    member: str
    step: int
    why: str


class MemberDied(msgspec.Struct, frozen=True):
    """The process of ``member`` is gone: ``how`` it ended.  The sender has waited for the process."""

    member: str
    how: str
    steps: int = -1
    """Lower bound of the steps committed there; -1: it never asked to commit one."""


class MemberNotice(msgspec.Struct, frozen=True, kw_only=True):
    """A notice of ``member`` to the hosts of the world of ``generation``; the leader passes it on as a ``WorldNotice``.

    It supersedes those of the same ``name`` with lower numbers.
    """

    member: str
    generation: int
    name: str
    number: int
    content: bytes


class HostDraining(msgspec.Struct, frozen=True):
    """The members of ``host`` are to leave at the end of a step, and none may join there; False: no longer so."""

    host: str
    is_draining: bool = True


class CommandsWanted(msgspec.Struct, frozen=True):
    """An agent now follows this leader, and has dropped earlier commands: all are to be announced again."""


class HostLeaving(msgspec.Struct, frozen=True):
    """The agent ends: it runs nothing, and no longer needs the group."""

    host: str


HostEvent = (
    JobOpened
    | JobClosed
    | MemberHealing
    | MemberArrived
    | MemberProgressed
    | MemberWithdrawn
    | MemberReady
    | MemberReported
    | MemberStopped
    | MemberResumed
    | MemberDraining
    | MemberLeft
    | MemberFailed
    | MemberDied
    | MemberNotice
    | HostDraining
    | HostLeaving
)


# Commands to a host, beside ``JobOpened`` and ``JobClosed``.


class WorldAnnounced(msgspec.Struct, frozen=True, kw_only=True):
    """The next world is decided: ``members`` in the order of their ranks.

    It is sent to every host; a new host receives the last one.
    """

    generation: int
    members: tuple[PlacedMember, ...]
    lineage: Lineage
    decision: Decision
    change: WorldChange
    origin: Lineage | None = None
    """The lineage of the job's initial state."""


class WorldStarted(msgspec.Struct, frozen=True):
    """All members of ``generation`` are ready, at ``addresses``, in the order of their ranks."""

    generation: int
    addresses: tuple[str, ...]


class WorldEnded(msgspec.Struct, frozen=True):
    """The world of ``generation`` is revoked: its members have to report; ``is_planned``: none of them is lost."""

    generation: int
    why: str
    is_planned: bool = False


class ChangePending(msgspec.Struct, frozen=True):
    """A change waits until the members of ``generation`` have ended a step."""

    generation: int


class MembersWanted(msgspec.Struct, frozen=True):
    """The world of ``generation`` is over, and too few are left for another: members that wait for a place may join."""

    generation: int


class MemberDismissed(msgspec.Struct, frozen=True):
    """There is no place for ``member`` any more: it was drained, is refused, or was declared lost."""

    member: str
    why: str
    is_drained: bool = False
    is_refused: bool = False


class MemberWaits(msgspec.Struct, frozen=True):
    """``member`` has arrived, but there is no place for it now, because of ``why``; it joins when there is one."""

    member: str
    why: str


class WorldNotice(msgspec.Struct, frozen=True, kw_only=True):
    """A member of the world of ``generation`` notifies the hosts of that world; see ``MemberNotice``."""

    generation: int
    notice: MemberNotice


class JobWaits(msgspec.Struct, frozen=True):
    """Job ``number`` waits for hosts: ``text`` says for how many.  ``report`` counts these reports."""

    number: int
    text: str
    report: int


class JobStopped(msgspec.Struct, frozen=True):
    """There can be no further world of job ``number``."""

    number: int
    why: str


class HostParked(msgspec.Struct, frozen=True):
    """This host reaches no quorum; ``why`` "": it does again.  Its members keep their state, and commit nothing."""

    why: str


class HostDismissed(msgspec.Struct, frozen=True):
    """This host was declared lost, and the others have gone on: its members have to end; it may join again."""

    why: str


class HostLost(msgspec.Struct, frozen=True):
    """``host`` is lost to a job with a fixed number of hosts, with its ranks, because of ``why``: it cannot go on."""

    host: str
    why: str


class ViewWanted(msgspec.Struct, frozen=True):
    """A request for what the ranks of a host do, which its agent understands; ``request`` numbers them."""

    request: int
    content: bytes


class ViewGiven(msgspec.Struct, frozen=True):
    """The answer to the ``ViewWanted`` with this number."""

    request: int
    content: bytes


HostCommand = (
    JobOpened
    | JobClosed
    | WorldAnnounced
    | WorldStarted
    | WorldEnded
    | ChangePending
    | MembersWanted
    | MemberDismissed
    | MemberWaits
    | WorldNotice
    | JobWaits
    | JobStopped
    | HostParked
    | HostDismissed
    | HostLost
)


class GroupHost(msgspec.Struct, frozen=True, kw_only=True):
    """A host of the group; ``address`` is that of its agent's server."""

    name: str
    address: str
    is_voter: bool = False
    is_draining: bool = False
    is_witness: bool = False


class WorldStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A host's view of its group.  ``leader`` None: none is known; ``parked`` "": a quorum is reached.

    ``world`` is the last one announced, ``job`` the last one opened.
    """

    leader: str | None
    hosts: tuple[GroupHost, ...]
    world: WorldAnnounced | None = None
    job: JobOpened | None = None
    closed: JobClosed | None = None
    parked: str = ""


_NUMBER = "#"


def number_host(host: str, number: int) -> str:
    """Return a name for the launcher ``number`` of a job on ``host``, where others may run, too."""
    return f"{host}{_NUMBER}{number}"


def shown_host(name: str) -> str:
    """Return the host in a name from ``number_host``, or ``name`` itself."""
    return name.partition(_NUMBER)[0]


def describe_full(most_hosts: int) -> str:
    """Return the reason why a host waits while the world has members of ``most_hosts``."""
    return f"the job has all its {most_hosts} host{'s' if most_hosts != 1 else ''}"


class WorldGroup(Protocol):
    """The group of agents, as seen by one of its hosts."""

    @property
    def commands(self) -> AsyncIterator[HostCommand]:
        """The commands to this host, each once and in order; ends when the group is left."""
        ...

    @property
    def lease(self) -> float:
        """Seconds for which no leader can declare this host lost; 0.0: it may be declared lost now."""
        ...

    def report(self, event: HostEvent) -> None:
        """Report ``event`` to the leader, and again, also to a new leader, until it is processed."""
        ...

    async def status(self) -> WorldStatus:
        """Return this host's view of the group."""
        ...

    async def stop(self) -> None:
        """Leave the group in good order."""
        ...

    def leave_at_once(self) -> None:
        """End ``stop`` at once, whatever the others know: they end, too, or a second signal has arrived."""
        ...
