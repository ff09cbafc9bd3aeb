"""Decisions of the leader of a group of agents about its hosts, its job and the worlds of the job.

Sans-I/O.  The state that must survive the leader is the *group state*: hosts, job, and the last world.  A change of it
is proposed, and counts once a quorum of voters has it; everything after it waits until then.  All else (which members
have arrived, are ready, have reported) is known to the hosts, which report it again to every new leader.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from asyncpar.hosts.director import GATHER_SECONDS, LEFT_WELL, DirectorCommand, ElasticDirector
from asyncpar.hosts.group import GroupNode, GroupState
from asyncpar.hosts.host_arrivals import HostArrivals
from asyncpar.hosts.lineage import Decision, Lineage
from asyncpar.hosts.messages import (
    HostCommand,
    HostDraining,
    HostEvent,
    HostLeaving,
    JobClosed,
    JobOpened,
    JobStopped,
    JobWaits,
    MemberArrived,
    MemberDied,
    MemberDismissed,
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
    MemberWaits,
    MemberWithdrawn,
    PlacedMember,
    WorldAnnounced,
    WorldChange,
    WorldNotice,
    describe_full,
    shown_host,
)
from asyncpar.hosts.next_world import FormWorld, WorldRules
from asyncpar.hosts.restart_budget import RestartBudget, wait_after
from asyncpar.hosts.total_loss import (
    ALL_LOST,
    UNKNOWN,
    refuse_to_begin_anew,
    refuse_to_begin_with,
    with_origin,
)

LOSSES_WITHIN = 600.0
"""Seconds for which the leader remembers the loss of a host of the world; the next leader counts anew."""
FORGIVEN_LOSSES = 2
"""A host that was lost more often recently waits before it has a place again, each time for longer."""
_HAS_LEFT = "it has left"


@dataclass(frozen=True, slots=True)
class HostReported:
    """A report of the agent ``node`` on its members."""

    node: str
    event: HostEvent


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """An agent requests to enter."""

    node: GroupNode


@dataclass(frozen=True, slots=True)
class NodeGone:
    """An agent leaves, or is declared lost, because of ``why``."""

    node: str
    why: str


@dataclass(frozen=True, slots=True)
class StateDecided:
    """The proposal is decided, and the next change may be proposed."""

    state: GroupState


@dataclass(frozen=True, slots=True)
class WorldTick:
    """Time has passed; ``quiet`` are the hosts that have been silent recently."""

    quiet: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class VotersDue:
    """Other nodes are to vote: the state has to be decided again, unchanged."""


WorldEvent = HostReported | NodeJoined | NodeGone | StateDecided | VotersDue | WorldTick


@dataclass(frozen=True, slots=True)
class ProposeState:
    """Propose this state; ``StateDecided`` comes when it is decided."""

    state: GroupState


@dataclass(frozen=True, slots=True)
class CommandHosts:
    """Send all agents ``command``: it concerns this world, and is repeated for agents that it may not have reached."""

    command: HostCommand


LeaderCommand = ProposeState | CommandHosts
_Change = Callable[[GroupState], GroupState]


@dataclass
class _FirstWorld:
    """The members that wait for the first world, or for the one after all members were lost."""

    arrived: dict[str, MemberArrived] = field(default_factory=dict)
    call_at: float | None = None
    """The time at which it begins without absent members."""

    @property
    def hosts(self) -> dict[str, int]:
        """Number of arrived members of each host."""
        counts: dict[str, int] = {}
        for arrived in self.arrived.values():
            counts[arrived.host] = counts.get(arrived.host, 0) + 1
        return counts


@dataclass
class _Failures:
    """Failures of the program at ``step``, by place: the host and slot of members."""

    step: int
    places: set[str]
    """The places of the world in which the first failure was."""
    counts: dict[str, int] = field(default_factory=dict)
    reported: set[tuple[str, int]] = field(default_factory=set)

    @property
    def are_everywhere(self) -> bool:
        """Whether all places have failed; a single one has to fail twice."""
        return sum(self.counts.values()) > 1 and self.places <= self.counts.keys()


def _difference(members: Sequence[MemberArrived]) -> str:
    """Describe a setting in which the first of ``members`` differs from another one; "" if there is none."""
    first, *others = members
    for other in others:
        one, another = dict(first.settings), dict(other.settings)
        for name in sorted(one.keys() | another.keys()):
            if one.get(name) != another.get(name):
                shown = f"{one.get(name)} at {first.member}, {another.get(name)} at {other.member}"
                return f"{name}: expected the same on all ranks when the job begins, got {shown}"
    return ""


def _same(state: GroupState) -> GroupState:
    return state


def _with_world(world: WorldAnnounced, state: GroupState) -> GroupState:
    return replace(state, world=with_origin(world, state.world), generation=world.generation + 1)


def _place(member: str) -> str:
    return member.rpartition("/")[0]


class WorldMachine:
    """The decisions of the agent that leads, from the decided ``state`` on."""

    def __init__(self, state: GroupState, *, now: float, absent: Callable[[], Sequence[int]] = tuple) -> None:
        """``absent`` returns the places of the hosts that are missing, as far as they are known."""
        self._state = state
        self._absent = absent
        self._queue: deque[_Change | CommandHosts] = deque()
        self._is_deciding = False
        self._deferred: list[WorldEvent] = []
        self._director: ElasticDirector | None = None
        self._first = _FirstWorld()
        self._placed: dict[str, PlacedMember] = {}
        self._places: dict[str, int] = {}
        """The places that members ask for in the first world."""
        self._healing: dict[str, str] = {}
        """The hosts of members that fetch the state."""
        self._losses = RestartBudget[str](most=FORGIVEN_LOSSES, window=LOSSES_WITHIN)
        self._cooling: dict[str, tuple[float, str]] = {}
        """The time until which hosts that were lost often have no place, and the reason."""
        self._draining: set[str] = set()
        self._quiet: frozenset[str] = frozenset()
        self._has_stopped = False
        self._arrivals = HostArrivals()
        self._short_since: float | None = None
        """The time since which the job has too few hosts for a world."""
        self._waiting: list[str] = []
        """The hosts that are here, as far as that was reported."""
        self._reports = 0
        self._failures = _Failures(-1, set())
        self._generation = state.generation
        """The generation of the next world, counting undecided changes."""
        self._begin(now)

    def _begin(self, now: float) -> None:
        """Resume the job and the world of the state."""
        self._generation = max(self._generation, self._state.generation)
        self._director, self._first, self._has_stopped = None, _FirstWorld(), False
        self._places.clear()
        self._steps = UNKNOWN
        """Lower bound of the steps committed by lost members."""
        world = self._state.world
        if world is not None and world.members:
            self._director = self._make_director(len(world.members), world.generation)
            self._director.resume(world.generation, tuple(member.name for member in world.members), now)
            self._placed = {member.name: member for member in world.members}
            hosts = {node.name for node in self._state.nodes}
            for member in [member for member in world.members if member.host not in hosts]:
                self._lost(member.name, "was lost with its host (it has left, or was lost)", now)  # no report follows

    def _make_director(self, size: int, generation: int) -> ElasticDirector:
        job = self._state.job
        assert job is not None, "only a job has worlds"
        return ElasticDirector(
            size,
            generation=generation,
            rules=WorldRules(
                may_form=self._is_enough,
                may_settle=self._will_be_enough,
                may_join=self._has_place,
                may_end=lambda members: all(self._placed[member].host in self._draining for member in members),
                are_more_coming=lambda: bool(self._healing),
                is_responding=lambda member: self._placed[member].host not in self._quiet,
                rank_order=lambda member: (self._places.get(member, math.inf), member),
            ),
            report_within=job.terms.report_within,
            gather_for=GATHER_SECONDS,
        )

    def _is_enough(self, members: Sequence[str], *more_hosts: str) -> bool:
        """Return whether there are members of enough hosts for a world; a job that is over goes on with any."""
        job = self._state.job
        hosts = {self._placed[member].host for member in members}.union(more_hosts)
        return job is None or not self._state.is_job_open or len(hosts) >= job.terms.least_hosts

    def _will_be_enough(self, members: Sequence[str]) -> bool:
        """Return whether there will be members of enough hosts once all that fetch the state have arrived."""
        return self._is_enough(members, *(host for host in self._healing.values() if host not in self._draining))

    def _has_place(self, members: Sequence[str], newcomer: str) -> bool:
        """Return whether there is a place for ``newcomer`` beside ``members``.

        No world has members of more than ``most_hosts``.  A host that was lost often has a place if the others are too
        few, or after a while.
        """
        job, host = self._state.job, self._placed[newcomer].host
        hosts = {self._placed[member].host for member in members}
        if job is None or host in hosts:
            return True
        return len(hosts) < job.terms.most_hosts and (host not in self._cooling or not self._is_enough(members))

    def handle(self, event: WorldEvent, *, now: float) -> list[LeaderCommand]:
        """Process ``event`` and return the resulting commands."""
        if self._is_deciding and not isinstance(event, StateDecided):
            self._deferred.append(event)
            return []
        match event:
            case HostReported(node, reported):
                sender = next((one for one in self._state.nodes if one.node == node), None)
                if sender is not None:
                    self._on_report(sender.name, reported, now)
            case NodeJoined(newcomer):
                if self._state.named(newcomer.name) is None:
                    self._change(lambda state: replace(state, nodes=(*state.nodes, newcomer)))
            case NodeGone(node, why):
                self._gone(node, why, now)
            case StateDecided(state):
                return self._decided(state, now)
            case VotersDue():
                self._change(_same)
            case WorldTick(quiet):
                self._quiet = quiet
                self._tick(now)
        return self._flush()

    @property
    def holders(self) -> frozenset[str]:
        """The hosts whose members hold the committed state, and can use it now."""
        members = () if self._director is None else self._director.holders
        return frozenset(self._placed[member].host for member in members)

    # -- changes -------------------------------------------------------------------------------------------------------

    def _change(self, change: _Change) -> None:
        self._queue.append(change)

    def _command(self, command: HostCommand) -> None:
        self._queue.append(CommandHosts(command))

    def _flush(self) -> list[LeaderCommand]:
        """Return waiting commands, up to the next change that has to be decided first."""
        commands: list[LeaderCommand] = []
        while self._queue and not self._is_deciding:
            item = self._queue.popleft()
            if isinstance(item, CommandHosts):
                commands.append(item)
                continue
            changed = item(self._state)
            if changed != self._state or item is _same:
                self._is_deciding = True
                commands.append(ProposeState(changed))
        return commands

    def _decided(self, state: GroupState, now: float) -> list[LeaderCommand]:
        """Continue from the decided state: first with the commands that waited for it, then with deferred events."""
        before, self._state, self._is_deciding = self._state, state, False
        if state.job != before.job:
            self._healing.clear()
            self._begin(now)
        commands = self._flush()
        deferred, self._deferred = self._deferred, []
        for event in deferred:
            commands += self.handle(event, now=now)
        return commands

    # -- hosts ---------------------------------------------------------------------------------------------------------

    def _gone(self, node: str, why: str, now: float) -> None:
        gone = next((one for one in self._state.nodes if one.node == node), None)
        if gone is None:
            return
        self._draining.discard(gone.name)
        members = () if self._director is None else self._director.members
        if why != _HAS_LEFT and any(self._placed[member].host == gone.name for member in members):
            why += self._cool(gone.name, now)  # the others have to go on without it
        self._healing = {member: host for member, host in self._healing.items() if host != gone.name}
        self._change(lambda state: replace(state, nodes=tuple(one for one in state.nodes if one.node != node)))
        for member in [name for name, placed in self._placed.items() if placed.host == gone.name]:
            self._lost(member, f"was lost with its host ({why})", now)

    def _cool(self, host: str, now: float) -> str:
        """Count the loss of a host; return the consequence, as text, if there were many losses, else ""."""
        if self._losses.crash(host, now) is not None:
            return ""
        count, minutes = self._losses.crashes(host), LOSSES_WITHIN / 60
        wait = wait_after(count)
        self._cooling[host] = now + wait, f"its host was lost {count} times within {minutes:g} minutes"
        return f"; this host was lost {count} times within {minutes:g} minutes, and may come in again after {wait:g} s"

    def _on_report(self, host: str, event: HostEvent, now: float) -> None:
        match event:
            case JobOpened():
                self._change(lambda state: self._opened(state, event))
            case JobClosed():
                self._change(lambda state: self._closed(state, event))
            case HostLeaving():
                gone = self._state.named(host)
                if gone is not None:
                    self._gone(gone.node, _HAS_LEFT, now)
            case HostDraining(_, is_draining):
                self._drain(host, is_draining)
            case MemberDraining(member):
                if self._director is not None and member in self._director.members:
                    self._obey(self._director.drain(member))
            case MemberArrived():
                self._arrived(event, now)
            case MemberHealing(member) if member not in self._placed:
                self._healing[member] = host
                if self._director is not None:
                    self._obey(self._director.reconsider(now))
            case _:
                self._on_member(event, now)

    @staticmethod
    def _opened(state: GroupState, event: JobOpened) -> GroupState:
        before = 0 if state.job is None else state.job.number
        if state.is_job_open or event.number != before + 1:
            return state
        return replace(state, job=event, world=None)

    @staticmethod
    def _closed(state: GroupState, event: JobClosed) -> GroupState:
        is_its = state.job is not None and state.job.number == event.number and state.is_job_open
        return replace(state, closed=event) if is_its else state

    def _drain(self, host: str, is_draining: bool) -> None:
        if not is_draining:
            self._draining.discard(host)
            return
        self._draining.add(host)
        for name, member in list(self._first.arrived.items()):
            if member.host == host:
                del self._first.arrived[name]
        if self._director is not None:
            for name in self._director.members:
                if self._placed[name].host == host:
                    self._obey(self._director.drain(name))

    # -- members -------------------------------------------------------------------------------------------------------

    def _arrived(self, event: MemberArrived, now: float) -> None:
        if not self._state.is_job_open or event.host in self._draining:
            return
        director = self._director
        self._healing.pop(event.member, None)
        if director is not None and event.member in director.members:
            return  # a repeated report
        self._placed[event.member] = PlacedMember(name=event.member, host=event.host, address=event.address)
        if director is None:
            if event.place is not None:
                self._places[event.member] = event.place
            self._first.arrived[event.member] = event
            self._consider_first(now)
        else:
            if not self._has_place(director.members, event.member):
                _, why = self._cooling.get(event.host, (now, self._all_hosts()))
                self._command(MemberWaits(event.member, why))
            self._obey(director.arrive(event.member, event.lineage, now))

    def _all_hosts(self) -> str:
        job = self._state.job
        assert job is not None, "only a job has members"
        return describe_full(job.terms.most_hosts)

    def _on_member(self, event: HostEvent, now: float) -> None:
        director = self._director
        match event:
            case MemberProgressed(member, lineage):
                if director is not None:
                    self._obey(director.progress(member, lineage, now))
                elif member in self._first.arrived:
                    self._first.arrived[member] = msgspec.structs.replace(self._first.arrived[member], lineage=lineage)
            case MemberReady(member, generation, address) if director is not None:
                self._obey(director.ready(member, generation, address))
            case MemberReported(member=member, report=report, why=why) if director is not None:
                is_repeated = report.generation < director.generation and member in director.members
                if not is_repeated:
                    self._obey(director.report(member, report, now, why))
            case MemberNotice(member=member, generation=generation) if director is not None:
                if generation == director.generation and member in director.all_members:
                    self._command(WorldNotice(generation=generation, notice=event))
            case MemberStopped() | MemberResumed():
                self._stopped(event, now)
            case _:
                self._member_gone(event, now)

    def _member_gone(self, event: HostEvent, now: float) -> None:
        match event:
            case MemberWithdrawn(member):
                self._lost(member, "had to begin anew", now)
            case MemberLeft(member):
                self._lost(member, LEFT_WELL, now)
            case MemberFailed(member, step, why):
                self._failed(member, step, why, now)
            case MemberDied(member, how, steps):
                self._steps = max(self._steps, steps if member in self._placed else UNKNOWN)
                self._lost(member, how, now)

    def _stopped(self, event: MemberStopped | MemberResumed, now: float) -> None:
        director = self._director
        if director is None or event.member not in director.members:
            return
        match event:
            case MemberStopped(member, how):
                director.stopped(member, how, now)
            case MemberResumed(member):
                director.resumed(member)

    def _failed(self, member: str, step: int, why: str, now: float) -> None:
        """Stop the job if its program has failed at the same step in every place: another world would not help."""
        failure, failures, job = (member, step), self._failures, self._state.job
        if failure in failures.reported or job is None:
            return
        if failures.step != step:
            members = () if self._director is None else self._director.all_members
            failures = self._failures = _Failures(step, {_place(one) for one in members})
        failures.reported.add(failure)
        failures.counts[_place(member)] = failures.counts.get(_place(member), 0) + 1
        self._lost(member, f"failed at step {step}: {why}", now)
        if failures.are_everywhere:
            self._stop(f"step {step}: it failed in every place; the fault is in the program, not in the world: {why}")

    def _lost(self, member: str, how: str, now: float) -> None:
        self._first.arrived.pop(member, None)
        self._healing.pop(member, None)
        if self._director is not None:
            self._obey(self._director.lost(member, how, now))
        if self._director is None or member not in self._director.members:
            self._placed.pop(member, None)

    # -- worlds --------------------------------------------------------------------------------------------------------

    def _consider_first(self, now: float) -> None:
        """Form the first world if all hosts are there, or enough of them and the last call is over."""
        job, first = self._state.job, self._first
        if job is None or self._director is not None or not self._state.is_job_open:
            return
        self._dismiss_healed()
        counts = first.hosts
        if len(counts) < job.terms.least_hosts:
            first.call_at = None
            return
        if first.call_at is None:
            first.call_at = now + job.terms.last_call
        whole = [host for host, count in counts.items() if count >= job.terms.members]
        if len(whole) < job.terms.most_hosts and now < first.call_at:
            return
        chosen = sorted(counts, key=lambda host: (host not in whole, list(counts).index(host)))[: job.terms.most_hosts]
        members = [arrived for arrived in first.arrived.values() if arrived.host in chosen]
        later = [arrived for arrived in first.arrived.values() if arrived.host not in chosen]
        lineages = [arrived.lineage for arrived in members]
        why = _difference(members) or refuse_to_begin_with(job.terms.on_total_loss, self._state.world, lineages)
        if why:
            self._stop(why)
        if self._has_stopped:
            return
        self._first = _FirstWorld()
        director = self._director = self._make_director(len(members), self._generation)
        for arrived in members:
            self._obey(director.arrive(arrived.member, arrived.lineage, now))
        for arrived in later:
            self._command(MemberDismissed(arrived.member, self._all_hosts()))

    def _dismiss_healed(self) -> None:
        """Dismiss members healed by members that are lost, if others have begun anew already."""
        arrived = self._first.arrived
        least = min((one.lineage.step for one in arrived.values()), default=0)
        if self._state.world is None:
            return
        for name in [name for name, one in arrived.items() if one.lineage.step > least]:
            del arrived[name]
            self._placed.pop(name, None)
            self._command(MemberDismissed(name, f"{ALL_LOST}, and with them the state that it has"))

    def _tick(self, now: float) -> None:
        self._cooling = {host: (until, why) for host, (until, why) in self._cooling.items() if now < until}
        if self._director is None:
            self._consider_first(now)
        else:
            self._obey(self._director.tick(now))
        self._consider_waiting(now)

    def _consider_waiting(self, now: float) -> None:
        """Report that the job waits for hosts, and end it after the time that its terms allow."""
        job, director = self._state.job, self._director
        hosts = [node.name for node in self._state.nodes if not node.is_witness and node.name not in self._draining]
        has_no_world = director is None or director.lacks_members
        is_open = self._state.is_job_open and not self._has_stopped
        if job is None or not is_open or not has_no_world or len(hosts) >= job.terms.least_hosts:
            self._short_since = None  # ranks of hosts that are here may take their time
            self._arrivals.end()
            return
        least = job.terms.least_hosts
        if self._short_since is None or hosts != self._waiting:
            self._short_since = now if self._short_since is None else self._short_since
            self._waiting = hosts
            self._arrivals.change(now)
        shown, absent = [shown_host(host) for host in hosts], self._absent()
        if text := self._arrivals.report(shown, least, now, absent=absent):
            self._reports += 1
            self._command(JobWaits(job.number, text, self._reports))
        limit = job.terms.wait_within
        if limit is not None and now - self._short_since >= limit:
            missing = f"missing: --node-rank {', '.join(map(str, absent))}; " if absent else ""
            self._stop(
                f"waited {limit:g} s for {least} host{'s' if least != 1 else ''} (--nnodes); {missing}present: "
                f"{', '.join(shown) or 'nobody'}. Start the missing ones with the same --rdzv-endpoint and --rdzv-id"
            )

    def _stop(self, why: str) -> None:
        """Stop the job: there can be no further world."""
        if self._state.job is not None and not self._has_stopped:
            self._has_stopped = True
            self._command(JobStopped(self._state.job.number, why))

    def _obey(self, commands: Sequence[DirectorCommand]) -> None:
        director = self._director
        assert director is not None, "it has just decided"
        for command in commands:
            if isinstance(command, FormWorld):
                self._announce(command)
            else:
                self._command(command)
        if director.trouble == ALL_LOST:
            self._begin_anew()
        elif director.trouble is not None:
            self._stop(director.trouble)

    def _announce(self, formed: FormWorld) -> None:
        generation = formed.change.generation
        self._generation = generation + 1
        world = WorldAnnounced(
            generation=generation,
            members=tuple(self._placed[name] for name in formed.members),
            lineage=formed.lineage,
            decision=formed.decision,
            change=formed.change,
        )
        self._change(partial(_with_world, world))

    def _begin_anew(self) -> None:
        """Begin without a state, which no member has any more: members that arrive from now on make a first world."""
        director = self._director
        assert director is not None, "there was a world"
        self._director, self._first = None, _FirstWorld()
        job, last = self._state.job, self._state.world
        if job is None or not self._state.is_job_open or director.have_all_left:
            return
        steps = max(self._steps, UNKNOWN if last is None or not last.lineage.step else last.lineage.step)
        self._steps = UNKNOWN
        if why := refuse_to_begin_anew(job.terms.on_total_loss, steps):
            self._stop(why)
        change = WorldChange(generation=self._generation, left=director.all_members, why=ALL_LOST, is_by_loss=True)
        world = WorldAnnounced(
            generation=self._generation, members=(), lineage=Lineage(steps, b""), decision=Decision.ABORT, change=change
        )
        self._generation += 1
        self._change(partial(_with_world, world))
