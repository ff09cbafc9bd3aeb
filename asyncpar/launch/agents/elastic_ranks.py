"""The decisions of one host about the ranks of a job whose processes outlive worlds (``--elastic ranks``).

Sans-I/O.  Each slot has one process at a time; each start of it is another *member*.  A member that crashes is started
again after a while, as often as the job allows.  A member that the others declare lost is ended and started again,
which does not count as a crash.  So is a stopped member while others that have the state go on; the leader decides
that.  When a slot may not start again until its oldest crash has left the window, the others go on without it.  A
process that the others do not admit, because it computes differently, has crashed, too.

Of slots and spares, as many are let in as the job has slots here, in the order in which they ask.  A spare waits for
the answer to its first question, which it gets when there is a place; by then it has done all that a program does
before its first step.  The ranks of a host for which the job has no place now, because its world has members on as many
other hosts as it may have, wait in the same way.  A rank that gets SIGTERM from elsewhere than its agent asks to leave
at the end of a step; it starts again, which does not count as a crash, unless its host leaves, too.

While the host is parked, its members are in no world: they keep their state, and report it to the leader when there is
a quorum.  A world that is announced meanwhile is held until then, with all later events of it: if it were revoked at
once, another one would follow, and another after that.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asyncpar.hosts.lineage import Lineage
from asyncpar.hosts.messages import (
    ChangePending,
    HostDismissed,
    HostDraining,
    HostParked,
    JobClosed,
    JobStopped,
    MemberDied,
    MemberDismissed,
    MemberDraining,
    MemberHealing,
    MemberLeft,
    MemberResumed,
    MemberStopped,
    MembersWanted,
    MemberWaits,
    WorldAnnounced,
    WorldEnded,
    WorldStarted,
    describe_full,
)
from asyncpar.hosts.pipe_messages import (
    AgentMessage,
    AllServed,
    ChangeWaits,
    DonorsFound,
    DonorsWanted,
    Drained,
    JobOver,
    JoinWorld,
    LeaseWanted,
    LeaveJob,
    LeaveRefused,
    LeaveWanted,
    NotAdmitted,
    RankMessage,
    StateReached,
    Withdraw,
    Withdrawn,
    WorldOver,
)
from asyncpar.hosts.restart_budget import RestartBudget
from asyncpar.launch.agents.host_protocol import (
    ConditionChanged,
    GrantLease,
    HostTick,
    LeaveHost,
    NotifyLeader,
    PrintLine,
    RankGone,
    RankResumed,
    RankSilent,
    RanksOver,
    RankWrote,
    SignalRank,
    SlotCommand,
    SlotEvent,
    StartRank,
    WriteToRank,
)
from asyncpar.launch.agents.job_record import JobEnd, SubmittedJob, decode_end, encode_record
from asyncpar.launch.agents.rank_dialogue import event_for_leader, world_for_rank
from asyncpar.launch.failure import RankEnd, describe
from asyncpar.net.security.identity import add_role, rank_role

_DRAINED = "it was drained"
_OF_A_WORLD = WorldAnnounced | WorldStarted | WorldEnded | ChangePending | MembersWanted


@dataclass
class _RankSlot:
    """One process at a time; ``member`` None: no process runs."""

    number: int
    member: str | None = None
    start_at: float | None = 0.0
    kill_at: float | None = None
    lineage: Lineage | None = None
    """The state with which it waits for its first world."""
    generation: int = -1
    """The last world that was announced to it."""
    rested_at: float | None = None
    """When a slot that has crashed too often may start again."""
    free_because: str = ""
    """Why its end is not a crash: it was drained, declared lost, or stopped."""
    has_place: bool = False
    """Whether it holds one of the job's places on this host."""
    asked_at: int | None = None
    """The number of its question that waits for a place."""
    is_departing: bool = False
    """Whether it got SIGTERM, not from this agent, and asks to leave at the end of a step."""
    steps: int = -1
    """The least number of steps that were committed; -1: it has not asked to commit one."""
    has_left: bool = False
    """Whether its process has announced its end."""
    has_printed: bool = False
    """Whether this host has printed that it waits."""


class ElasticRanks:
    """The ranks of one job on ``host``.

    ``draw`` returns names for new members that were never used before; ``certified`` are the numbers in the
    certificates of the slots, None if there are none.
    """

    def __init__(
        self,
        number: int,
        record: SubmittedJob,
        *,
        host: str,
        draw: Callable[[], str],
        certified: Sequence[int] | None = None,
    ) -> None:
        self._number = number
        self._record = record
        self._host = host
        self._draw = draw
        self._certified = certified
        self._slots = [_RankSlot(number) for number in range(record.slots + record.spares)]
        self._budget = RestartBudget[int](most=record.max_restarts, window=record.restart_window)
        self._world: WorldAnnounced | None = None
        self._end: JobEnd | None = None
        self._parked = ""
        """Why members may commit nothing now."""
        self._held: list[SlotEvent] = []
        """The worlds that were announced since then, and the later events of these."""
        self._is_short = False
        """Whether the current world is over and the next one waits for more members."""
        self._is_leaving = False
        self._leave_at: float | None = None
        self._is_over = False
        self._asked = 0
        self._failures: list[RankEnd] = []
        self._outlived = 0
        """The number of failures before the current world."""
        self._refusals: dict[int, str] = {}

    @property
    def next_deadline(self) -> float | None:
        """See ``SlotsMachine``."""
        due = [at for slot in self._slots for at in (slot.start_at, slot.rested_at, slot.kill_at)]
        times = [at for at in due if at is not None]
        return min([*times, *([] if self._leave_at is None else [self._leave_at])], default=None)

    @property
    def restarts(self) -> dict[int, int]:
        """The number of recent crashes of each slot."""
        return {slot.number: self._budget.crashes(slot.number) for slot in self._slots}

    @property
    def failures(self) -> tuple[RankEnd, ...]:
        """The crashes, in chronological order."""
        return tuple(self._failures)

    @property
    def ranks(self) -> dict[int, int]:
        """The ranks of the slots in the current world."""
        names = [] if self._world is None else [placed.name for placed in self._world.members]
        return {slot.number: names.index(slot.member) for slot in self._slots if slot.member in names}

    @property
    def spares(self) -> frozenset[int]:
        """The slots whose processes wait for a place."""
        return frozenset(slot.number for slot in self._slots if slot.asked_at is not None)

    @property
    def refusals(self) -> dict[int, str]:
        """By slot: why the others have not admitted its last process.  It starts again, at growing intervals."""
        return dict(self._refusals)

    def begin(self, now: float) -> list[SlotCommand]:
        """See ``SlotsMachine``."""
        return self._tick(now)

    def handle(self, event: SlotEvent, *, now: float) -> list[SlotCommand]:
        """See ``SlotsMachine``."""
        if self._is_over:
            return []
        match event:
            case RankWrote(member, message):
                commands = self._received(member, message)
            case RankGone(slot, end):
                commands = self._gone(self._slots[slot], end, now)
            case RankSilent(slot, how):
                commands = self._silent(self._slots[slot], how)
            case ConditionChanged(slot, how):
                commands = [PrintLine(f"rank {self._title(self._slots[slot])} {how}")]
            case RankResumed(slot):
                commands = self._resumed(self._slots[slot])
            case LeaveHost(grace, why):
                commands = self._leave(grace, why, now)
            case HostTick():
                commands = self._tick(now)
            case JobClosed() | JobStopped() | HostDismissed():
                commands = self._job_changed(event, now)
            case _:
                commands = self._world_changed(event)
        return commands + self._admit() + self._over()

    def _silent(self, slot: _RankSlot, how: str) -> list[SlotCommand]:
        """Leave the decision on a stopped rank of a world to the leader: it may be the last that has the state."""
        if slot.member is None or not self._is_placed(slot.member):
            return self._free(slot, how)
        return [NotifyLeader(MemberStopped(slot.member, how))]

    def _resumed(self, slot: _RankSlot) -> list[SlotCommand]:
        is_placed = slot.member is not None and self._is_placed(slot.member)
        return [NotifyLeader(MemberResumed(slot.member))] if is_placed and slot.member else []

    def _is_placed(self, member: str) -> bool:
        """Return whether ``member`` is in the current world."""
        return self._world is not None and member in [placed.name for placed in self._world.members]

    # -- messages of ranks ---------------------------------------------------------------------------------------------

    def _received(self, member: str, message: RankMessage) -> list[SlotCommand]:
        slot = next((slot for slot in self._slots if slot.member == member), None)
        if slot is None:
            return []
        event = event_for_leader(member, self._host, message)
        commands: list[SlotCommand] = [] if event is None else [NotifyLeader(event)]
        match message:
            case DonorsWanted():
                self._asked += 1
                slot.asked_at = self._asked
            case LeaveWanted():
                commands.append(self._depart(slot, member))
            case LeaseWanted(steps):
                slot.steps = max(slot.steps, steps)
                commands += [] if slot.free_because else [GrantLease(member)]
            case NotAdmitted(why):
                commands += self._refused(slot, why)
            case JoinWorld(lineage) | StateReached(lineage):
                slot.lineage = lineage
            case LeaveJob():
                slot.has_left = True
            case Withdraw():
                slot.lineage = None
                commands.append(WriteToRank(member, Withdrawn()))
        return commands

    def _refused(self, slot: _RankSlot, why: str) -> list[SlotCommand]:
        """Record that the others do not admit a process, and print the first reason; its end counts as a crash."""
        is_known, self._refusals[slot.number] = slot.number in self._refusals, why
        return [] if is_known else [PrintLine(f"rank {self._title(slot)} is not admitted: {why}")]

    def _depart(self, slot: _RankSlot, member: str) -> SlotCommand:
        """Let a rank that got SIGTERM leave; one that is to end anyway, or has no survivors, ends at once."""
        others = () if self._world is None else [placed.name for placed in self._world.members if placed.name != member]
        is_ending = slot.kill_at is not None or bool(slot.free_because) or self._end is not None
        if is_ending or self._parked or slot.generation < 0 or not others:
            return WriteToRank(member, LeaveRefused())
        slot.is_departing = True
        return NotifyLeader(MemberDraining(member))

    def _admit(self) -> list[SlotCommand]:
        """Answer the ranks that ask and have, or find, a place; once the job is complete no more are needed."""
        commands: list[SlotCommand] = []
        is_full = self._is_full()
        waits = self._is_leaving or (bool(self._parked) and self._end is None)  # parked, it may know lost members only
        asking = () if waits else sorted(self._slots, key=lambda one: one.asked_at or 0)
        for slot in asking:
            if slot.asked_at is None or slot.member is None or slot.free_because:
                continue
            if self._end is not None:  # also one that had a place: those that could heal it are done
                slot.asked_at, slot.free_because = None, _DRAINED
                commands.append(WriteToRank(slot.member, Drained()))
            elif is_full:
                commands += [] if slot.has_printed else self._print_waits(slot, describe_full(self._record.most_hosts))
            elif slot.has_place or sum(one.has_place for one in self._slots) < self._record.slots:
                commands += self._heal(slot.member, slot.asked_at)
                slot.has_place, slot.asked_at = True, None
        return commands

    def _is_full(self) -> bool:
        """Return whether there is no place for ranks of this host."""
        hosts = set() if self._world is None else {placed.host for placed in self._world.members}
        return self._host not in hosts and len(hosts) >= self._record.most_hosts and not self._is_short

    def _print_waits(self, slot: _RankSlot, why: str) -> list[SlotCommand]:
        slot.has_printed = True
        return [PrintLine(f"rank {self._title(slot)} waits: {why}")]

    def _heal(self, member: str, number: int) -> list[SlotCommand]:
        """Send the donors of the state to a newcomer, each time beginning with another one."""
        placed = () if self._world is None else self._world.members
        found = [(one.name, one.address) for one in placed if one.name != member]
        start = number % len(found) if found else 0
        answer = WriteToRank(member, DonorsFound((*found[start:], *found[:start])))
        return [NotifyLeader(MemberHealing(member, self._host)), answer] if found else [answer]

    # -- decisions -----------------------------------------------------------------------------------------------------

    def _world_changed(self, event: SlotEvent) -> list[SlotCommand]:
        if self._parked and (self._held or isinstance(event, WorldAnnounced)) and isinstance(event, _OF_A_WORLD):
            self._held.append(event)
            return []
        match event:
            case WorldAnnounced():
                return self._announced(event)
            case WorldStarted(generation, addresses):
                return self._write(AllServed(generation, addresses), lambda slot: slot.generation == generation)
            case WorldEnded(generation, why, is_planned):
                return self._revoke(generation, why, is_planned=is_planned)
            case HostParked(why):
                return self._park(why)
            case ChangePending(generation):
                return self._write(ChangeWaits(generation), lambda slot: slot.generation == generation)
            case MemberDismissed(member, why):
                return self._dismissed(event, member, why)
            case MembersWanted(generation):
                self._is_short = self._world is not None and self._world.generation == generation
            case MemberWaits(member, why):
                waiting = [slot for slot in self._slots if slot.member == member and not slot.has_printed]
                return [line for slot in waiting for line in self._print_waits(slot, why)]
        return []

    def _park(self, why: str) -> list[SlotCommand]:
        """Keep the members of this host out of all worlds; "": go on with the events that were held meanwhile."""
        self._parked = why
        if why:
            return [] if self._world is None else self._revoke(self._world.generation, why)
        held, self._held = self._held, []
        return [command for event in held for command in self._world_changed(event)]

    def _revoke(self, generation: int, why: str, *, is_planned: bool = False) -> list[SlotCommand]:
        return self._write(WorldOver(generation, why, is_planned), lambda slot: slot.generation == generation)

    def _write(self, message: AgentMessage, wanted: Callable[[_RankSlot], bool]) -> list[SlotCommand]:
        slots = [slot for slot in self._slots if slot.member is not None and wanted(slot)]
        return [WriteToRank(slot.member, message) for slot in slots if slot.member is not None]

    def _announced(self, announced: WorldAnnounced) -> list[SlotCommand]:
        self._world, self._is_short = announced, False
        self._outlived = len(self._failures) if announced.members else self._outlived
        hosts = len({placed.host for placed in announced.members})
        size = len(announced.members)
        ranks = f"{size} rank{'s' if size != 1 else ''} on {hosts} host{'s' if hosts != 1 else ''}"
        commands: list[SlotCommand] = [PrintLine(f"{announced.change}; {ranks}")]
        if not announced.members:  # no member is left that could give the rest of the state
            healing = [slot for slot in self._slots if slot.generation < 0 and slot.has_place and slot.lineage is None]
            commands += [command for slot in healing for command in self._free(slot, announced.change.why)]
        commands += self._end_left_out(announced)
        for slot in self._slots:
            if slot.member is None or (slot.generation < 0 and slot.lineage != announced.lineage):
                continue  # a newcomer that has withdrawn
            message = world_for_rank(announced, slot.member, job=self._record.name)
            if message is not None:
                slot.generation = announced.generation
                self._refusals.pop(slot.number, None)
                commands.append(WriteToRank(slot.member, message))
        return commands

    def _end_left_out(self, announced: WorldAnnounced) -> list[SlotCommand]:
        """End members that the others have gone on without, even if no notice of that has come."""
        names = {placed.name for placed in announced.members}
        commands: list[SlotCommand] = []
        for slot in self._slots:
            is_in = slot.generation >= 0 and not slot.free_because and not slot.has_left
            if slot.member is None or slot.member in names or not is_in:
                continue
            is_drained = self._is_leaving or slot.is_departing
            why = f"the others have gone on without it: {announced.change.why}"
            commands += self._dismissed(MemberDismissed(slot.member, why, is_drained=is_drained), slot.member, why)
        return commands

    def _dismissed(self, event: MemberDismissed, member: str, why: str) -> list[SlotCommand]:
        slot = next((slot for slot in self._slots if slot.member == member), None)
        if slot is None:
            return []
        if event.is_refused:
            return [*self._refused(slot, why), SignalRank(slot.number, signal.SIGKILL)]
        if event.is_drained or (self._end is not None and self._end.is_complete and slot.generation < 0):
            slot.free_because = _DRAINED
            return [WriteToRank(member, Drained())]
        return [PrintLine(f"rank {self._title(slot)} is ended: {why}"), *self._free(slot, why)]

    def _free(self, slot: _RankSlot, why: str) -> list[SlotCommand]:
        """End a process that is no longer of use; its end is not a crash."""
        if slot.member is None:
            return []
        slot.free_because, slot.has_place = slot.free_because or why, False
        return [SignalRank(slot.number, signal.SIGKILL)]

    # -- processes -----------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> list[SlotCommand]:
        commands: list[SlotCommand] = []
        if self._leave_at is not None and now >= self._leave_at:
            self._leave_at = None
            commands += [PrintLine("its ranks have not left in time; ending them"), *self._terminate(now)]
        for slot in self._slots:
            if slot.kill_at is not None and now >= slot.kill_at:
                slot.kill_at = None
                commands.append(SignalRank(slot.number, signal.SIGKILL))
            if slot.rested_at is not None and now >= slot.rested_at:
                slot.start_at, slot.rested_at = now, None
                commands.append(PrintLine(f"rank {self._title(slot)} starts again: its crashes are long ago"))
            if slot.start_at is not None and now >= slot.start_at:
                commands += self._start(slot)
        return commands

    def _start(self, slot: _RankSlot) -> list[SlotCommand]:
        if self._end is not None or self._is_leaving:
            slot.start_at = None
            return []
        role = None if self._certified is None else rank_role(self._certified[slot.number])
        member = add_role(f"{self._host}/{slot.number}/{self._draw()}", role)
        self._slots[slot.number] = _RankSlot(slot.number, member, start_at=None)
        return [StartRank(slot.number, member)]

    def _gone(self, slot: _RankSlot, end: RankEnd, now: float) -> list[SlotCommand]:
        member, slot.member, slot.kill_at = slot.member, None, None
        is_done = end.returncode == 0 and not slot.is_departing
        slot.has_place = slot.has_place and is_done  # a rank that has finished keeps its place
        assert member is not None, "a process has a name"
        if end.returncode == 0:
            commands: list[SlotCommand] = [NotifyLeader(MemberLeft(member))]
        else:
            commands = [NotifyLeader(MemberDied(member, slot.free_because or end.ending, slot.steps))]
        if self._end is not None or self._is_leaving:
            return commands
        if slot.free_because == _DRAINED:
            return commands + (self._again(slot, now) if slot.is_departing else [])
        if end.returncode == 0:
            return commands + self._close(JobEnd(exit_code=0))
        return commands + (self._again(slot, now) if slot.free_because else self._crashed(slot, end, now))

    def _again(self, slot: _RankSlot, now: float) -> list[SlotCommand]:
        slot.start_at = now
        return [PrintLine(f"rank {self._title(slot)} starts again: {slot.free_because}")]

    def _crashed(self, slot: _RankSlot, end: RankEnd, now: float) -> list[SlotCommand]:
        self._failures.append(end)
        wait, most = self._budget.crash(slot.number, now), self._budget.most
        title = f"rank {self._title(slot)} {end.ending}"
        if wait is None:
            slot.rested_at = self._budget.rested_at(slot.number)
            reason = f"it may not start again (--max-restarts {most} within {self._budget.window:g} s)"
            printed: list[SlotCommand] = [PrintLine(f"{title}; {reason}")]
            if any(other.member is not None or other.start_at is not None for other in self._slots):
                return printed
            return printed if self._has_others() else printed + self._close(self._failed())
        slot.start_at = now + wait
        return [
            PrintLine(f"{title}; it starts again in {wait:g} s (restart {self._budget.crashes(slot.number)} of {most})")
        ]

    def _has_others(self) -> bool:
        """Return whether ranks of other hosts go on."""
        return self._world is not None and any(placed.host != self._host for placed in self._world.members)

    def _failed(self) -> JobEnd:
        """Return the end of the job by its last failures, except for killed ranks without which the job went on.

        An exception also counts if a world has formed since: it may have been raised again, and be the reason.
        """
        last = list(enumerate(self._failures))[-self._record.slots :]
        found = [end for number, end in last if number >= self._outlived or end.report is not None]
        return JobEnd(exit_code=found[-1].exit_code, message=describe(found)) if found else JobEnd(exit_code=1)

    def _title(self, slot: _RankSlot) -> str:
        return f"{self._host}/{slot.number}"

    # -- the end -------------------------------------------------------------------------------------------------------

    def _close(self, end: JobEnd) -> list[SlotCommand]:
        return [NotifyLeader(JobClosed(number=self._number, record=encode_record(end)))]

    def _job_changed(self, event: JobClosed | JobStopped | HostDismissed, now: float) -> list[SlotCommand]:
        match event:
            case JobClosed(number=number, record=content) if number == self._number and self._end is None:
                self._end = decode_end(content)
                for slot in self._slots:
                    slot.start_at = slot.rested_at = None
                return [] if self._end.is_complete else self._terminate(now)
            case JobStopped(number, why) if number == self._number and self._end is None:
                end = self._failed()
                message = f"{why}\n{end.message}" if end.message else why
                notices = self._write(JobOver(why), lambda _: True)
                return notices + self._close(JobEnd(exit_code=end.exit_code, message=message))
            case HostDismissed(why):
                printed: list[SlotCommand] = [PrintLine(f"the others have gone on without this host: {why}")]
                return [*printed, *(command for slot in self._slots for command in self._free(slot, why))]
        return []

    def _leave(self, grace: float, why: str, now: float) -> list[SlotCommand]:
        if self._is_leaving:
            return self._terminate(now)
        self._is_leaving, self._leave_at = True, now + grace
        for slot in self._slots:
            slot.start_at = slot.rested_at = None
        printed = PrintLine(f"{why}; its ranks leave at the end of a step, within {grace:g} s")
        waiting = [slot for slot in self._slots if slot.member is not None and slot.generation < 0]
        ended = [SignalRank(slot.number, signal.SIGTERM) for slot in waiting]  # they have nothing to hand over
        for slot in waiting:
            slot.kill_at = now + self._record.grace
        return [printed, NotifyLeader(HostDraining(self._host)), *ended]

    def _terminate(self, now: float) -> list[SlotCommand]:
        running = [slot for slot in self._slots if slot.member is not None]
        for slot in running:
            slot.kill_at = now + self._record.grace
        return [SignalRank(slot.number, signal.SIGTERM) for slot in running]

    def _over(self) -> list[SlotCommand]:
        has_ended = self._end is not None or self._is_leaving
        if not has_ended or any(slot.member is not None for slot in self._slots):
            return []
        self._is_over, self._leave_at = True, None
        return [RanksOver(self._end)]
