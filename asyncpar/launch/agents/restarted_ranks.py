"""The decisions of one host about the ranks of a job that start again with every world (``--elastic restart``).

Sans-I/O.  The host as a whole is one member: it arrives, starts its ranks when a world has begun, ends them when it is
revoked, and reports.  So programs need not know of worlds, as under torchrun.  The only state of such a member is the
number of worlds so far, which is equal on all hosts; this is its lineage.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from asyncpar.core.addresses import split_address
from asyncpar.launch.agents.host_protocol import (
    ConditionChanged,
    HostTick,
    LeaveHost,
    NotifyLeader,
    OpenRendezvous,
    PrintLine,
    RankGone,
    RankPlace,
    RankSilent,
    RanksOver,
    SignalRank,
    SlotCommand,
    SlotEvent,
    StartRank,
)
from asyncpar.launch.agents.job_record import JobEnd, SubmittedJob, decode_end, encode_record
from asyncpar.launch.failure import RankEnd, add_leavers, choose_first, describe
from asyncpar.net.membership.lineage import Lineage, MemberReport
from asyncpar.net.membership.restart_budget import RestartBudget
from asyncpar.net.membership.world_messages import (
    ChangePending,
    HostDismissed,
    HostDraining,
    HostParked,
    JobClosed,
    JobStopped,
    MemberArrived,
    MemberDismissed,
    MemberLeft,
    MemberProgressed,
    MemberReady,
    MemberReported,
    MemberWaits,
    WorldAnnounced,
    WorldEnded,
    WorldStarted,
)

_REASON_SECONDS = 0.3
"""Seconds from the failure of a rank until the others are ended, in which those that lost it can report it."""


class HostRanks(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks that a host adds to a world, as all members receive it; ``rendezvous`` is the one its agent serves.

    Where there are certificates, ``certified`` has the numbers in those of the ranks, and ``role`` the label of the
    role in the agent's.
    """

    slots: int
    rendezvous: str
    certified: tuple[int, ...] | None = None
    role: str | None = None


@dataclass
class _World:
    """The world of this host."""

    announced: WorldAnnounced
    running: set[int] = field(default_factory=set)
    failures: list[RankEnd] = field(default_factory=list)
    done: list[RankEnd] = field(default_factory=list)
    has_started: bool = False
    is_over: bool = False
    why: str = ""
    stop_at: float | None = None
    kill_at: float | None = None

    @property
    def is_done(self) -> bool:
        return self.has_started and not self.running and not self.failures


class RestartedRanks:
    """The ranks of one job on ``host``; ``own`` are those that it adds to each world."""

    def __init__(
        self,
        number: int,
        record: SubmittedJob,
        *,
        host: str,
        own: HostRanks,
        free_port: Callable[[], int],
        draw: Callable[[], str],
    ) -> None:
        self._number = number
        self._record = record
        self._host = host
        self._own = own
        self._free_port = free_port
        self._draw = draw
        self._budget = RestartBudget[int](most=record.max_restarts, window=record.restart_window)
        self._member: str | None = None
        self._lineage = Lineage(0, b"")
        self._world: _World | None = None
        self._arrive_at: float | None = None
        self._end: JobEnd | None = None
        self._is_leaving = False
        self._is_parked = False
        self._leave_at: float | None = None
        self._is_over = False
        self._restarts = 0

    @property
    def next_deadline(self) -> float | None:
        """See ``SlotsMachine``."""
        times = [self._arrive_at, self._leave_at]
        times += [] if self._world is None else [self._world.stop_at, self._world.kill_at]
        return min((at for at in times if at is not None), default=None)

    @property
    def restarts(self) -> dict[int, int]:
        """The number of recent crashes of each slot."""
        return {slot: self._budget.crashes(slot) for slot in range(self._record.slots)}

    @property
    def ranks(self) -> dict[int, int]:
        """The ranks of the slots that run."""
        if self._world is None or not self._world.has_started:
            return {}
        names = [placed.name for placed in self._world.announced.members]
        before = self._hosts()[: names.index(str(self._member))] if self._member in names else []
        offset = sum(ranks.slots for ranks in before)
        return {slot: offset + slot for slot in sorted(self._world.running)}

    @property
    def spares(self) -> frozenset[int]:
        """Always empty: ranks that start with their world are soon there."""
        return frozenset()

    def begin(self, now: float) -> list[SlotCommand]:  # noqa: ARG002
        """See ``SlotsMachine``."""
        return self._arrive()

    def handle(self, event: SlotEvent, *, now: float) -> list[SlotCommand]:
        """See ``SlotsMachine``."""
        if self._is_over:
            return []
        match event:
            case RankGone(slot, end):
                commands = self._gone(slot, end, now)
            case RankSilent() if self._is_parked:
                commands = []
            case ConditionChanged() if self._is_parked:
                commands = []
            case ConditionChanged(slot, how):
                commands = [PrintLine(f"rank of slot {slot} {how}")]
            case RankSilent(slot, how):
                commands = [PrintLine(f"rank of slot {slot} {how}"), SignalRank(slot, signal.SIGKILL)]
            case LeaveHost(grace, why):
                commands = self._leave(grace, why, now)
            case HostTick():
                commands = self._tick(now)
            case JobClosed() | JobStopped() | HostDismissed():
                commands = self._job_changed(event, now)
            case HostParked(why):
                self._is_parked = bool(why)
                commands = self._signal(signal.SIGSTOP if why else signal.SIGCONT)
            case _:
                commands = self._world_changed(event, now)
        return commands + self._over()

    # -- worlds --------------------------------------------------------------------------------------------------------

    def _arrive(self) -> list[SlotCommand]:
        """Arrive as a newcomer."""
        self._arrive_at = None
        if self._end is not None or self._is_leaving:
            return []
        self._member = f"{self._host}/all/{self._draw()}"
        address = msgspec.json.encode(self._own).decode()
        arrived = MemberArrived(member=self._member, host=self._host, lineage=self._lineage, address=address)
        return [NotifyLeader(arrived), NotifyLeader(MemberProgressed(self._member, self._lineage))]

    def _world_changed(self, event: SlotEvent, now: float) -> list[SlotCommand]:
        match event:
            case WorldAnnounced():
                return self._announced(event)
            case WorldStarted(generation, addresses) if self._is_in(generation):
                return self._started(addresses)
            case WorldEnded(generation, why) if self._is_in(generation):
                return self._ended(why, now)
            case ChangePending(generation) if self._is_in(generation):
                return self._ended("a host joins or leaves", now)
            case MemberDismissed(member, why, is_drained) if member == self._member:
                return self._dismissed("" if is_drained else why, now)
            case MemberWaits(member, why) if member == self._member:
                return [PrintLine(f"this host waits: {why}")]
        return []

    def _is_in(self, generation: int) -> bool:
        return self._world is not None and self._world.announced.generation == generation

    def _announced(self, announced: WorldAnnounced) -> list[SlotCommand]:
        self._lineage = Lineage(announced.generation + 1, b"")
        hosts = len(announced.members)
        printed: list[SlotCommand] = [PrintLine(f"{announced.change}; {hosts} host{'s' if hosts != 1 else ''}")]
        names = [placed.name for placed in announced.members]
        if self._member is None:
            return printed
        if self._member not in names:
            is_waiting = self._world is None
            return [*printed, NotifyLeader(MemberProgressed(self._member, self._lineage))] if is_waiting else printed
        self._world = _World(announced)
        if names[0] != self._member:
            return [*printed, NotifyLeader(MemberReady(self._member, announced.generation, ""))]
        port = self._free_port()
        ready = MemberReady(self._member, announced.generation, str(port))
        there = self._hosts()
        size = sum(ranks.slots for ranks in there)
        return [*printed, OpenRendezvous(announced.generation, size, _certified(there)), NotifyLeader(ready)]

    def _hosts(self) -> list[HostRanks]:
        """Return the ranks of each host of the world, in the order of their ranks."""
        assert self._world is not None
        members = self._world.announced.members
        return [msgspec.json.decode(placed.address, type=HostRanks) for placed in members]

    def _started(self, addresses: tuple[str, ...]) -> list[SlotCommand]:
        world = self._world
        assert world is not None
        if world.is_over or world.has_started:
            return []
        members, there = world.announced.members, self._hosts()
        own = [placed.name for placed in members].index(str(self._member))
        first, certified = there[0], _certified(there)
        world.has_started, world.running = True, set(range(self._record.slots))
        offset = sum(ranks.slots for ranks in there[:own])
        return [
            StartRank(
                slot,
                str(self._member),
                RankPlace(
                    generation=world.announced.generation,
                    rank=offset + slot,
                    world_size=sum(ranks.slots for ranks in there),
                    group_rank=own,
                    group_world_size=len(members),
                    rendezvous=first.rendezvous,
                    master_addr=split_address(first.rendezvous)[0],
                    master_port=int(addresses[0]),
                    restarts=self._restarts,
                    certified=certified,
                    rendezvous_role=first.role,
                ),
            )
            for slot in range(self._record.slots)
        ]

    def _ended(self, why: str, now: float) -> list[SlotCommand]:
        """End the ranks of a world that is over, then report."""
        world = self._world
        assert world is not None
        if world.is_over or self._end is not None:
            return []
        world.is_over, world.why = True, why
        if not world.running:
            return self._report()
        world.kill_at = now + self._record.grace
        return [PrintLine(f"{why}; stopping all ranks"), *self._signal(signal.SIGTERM)]

    def _report(self) -> list[SlotCommand]:
        world = self._world
        assert world is not None
        self._restarts += 1
        report = MemberReport(generation=world.announced.generation, lineage=self._lineage)
        return [NotifyLeader(MemberReported(member=str(self._member), report=report, why=world.why))]

    def _dismissed(self, why: str, now: float) -> list[SlotCommand]:
        """Arrive again as another member, unless the host leaves: there is no place for this one."""
        self._member = None
        self._arrive_at = now + 1.0
        how = "waits" if self._world is None else "was declared lost"
        printed: list[SlotCommand] = [PrintLine(f"this host {how}: {why}")] if why else []
        if self._world is None or not self._world.running:
            self._world = None
            return printed
        self._world.is_over = True
        return printed + (self._stop(now) if not why else self._signal(signal.SIGKILL))

    # -- processes -----------------------------------------------------------------------------------------------------

    def _signal(self, number: int) -> list[SlotCommand]:
        numbers = [number, signal.SIGCONT] if number == signal.SIGTERM and self._is_parked else [number]
        slots = [] if self._world is None else sorted(self._world.running)
        return [SignalRank(slot, one) for slot in slots for one in numbers]

    def _stop(self, now: float) -> list[SlotCommand]:
        if self._world is not None and self._world.running:
            self._world.kill_at = now + self._record.grace
        return self._signal(signal.SIGTERM)

    def _gone(self, slot: int, end: RankEnd, now: float) -> list[SlotCommand]:
        world = self._world
        assert world is not None, "a process has a world"
        world.running.discard(slot)
        if end.returncode != 0 and not world.is_over:
            world.failures.append(end)
            world.stop_at = world.stop_at or now + _REASON_SECONDS
        elif end.returncode == 0 and not world.is_over:
            world.done.append(end)
        world.failures = add_leavers(world.failures, world.done)
        if world.running:
            return []
        world.kill_at = None
        if self._member is None:
            self._world = None
            return []
        if self._end is not None:
            return []
        if self._is_leaving:
            return [NotifyLeader(MemberLeft(self._member))]
        if world.failures:
            world.stop_at = None
            return self._failed(now)
        return self._report() if world.is_over else self._done()

    def _done(self) -> list[SlotCommand]:
        """Handle the successful end of all ranks of this host; those of the others are about to end."""
        return self._close(JobEnd(exit_code=0))

    def _failed(self, now: float) -> list[SlotCommand]:
        world = self._world
        assert world is not None
        first = choose_first(world.failures)
        is_own = not first.is_peer_error
        if is_own and self._budget.crash(first.local_rank, now) is None:
            return self._close(JobEnd(exit_code=first.exit_code, message=describe(world.failures)))
        world.why = world.why or f"rank {first.rank} on {self._host} {first.ending}"
        if world.is_over:
            return self._report()
        world.is_over = True
        count = f" (restart {self._budget.crashes(first.local_rank)} of {self._budget.most})" if is_own else ""
        return [PrintLine(f"{world.why}; starting all ranks again{count}"), *self._report()]

    # -- the end -------------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> list[SlotCommand]:
        commands: list[SlotCommand] = []
        if self._arrive_at is not None and now >= self._arrive_at and self._world is None:
            commands += self._arrive()
        if self._leave_at is not None and now >= self._leave_at:
            self._leave_at = None
            commands += self._stop(now)
        world = self._world
        if world is not None and world.stop_at is not None and now >= world.stop_at:
            world.stop_at = None
            commands += self._stop(now)
        if world is not None and world.kill_at is not None and now >= world.kill_at:
            world.kill_at = None
            commands += self._signal(signal.SIGKILL)
        return commands

    def _close(self, end: JobEnd) -> list[SlotCommand]:
        return [NotifyLeader(JobClosed(number=self._number, record=encode_record(end)))]

    def _job_changed(self, event: JobClosed | JobStopped | HostDismissed, now: float) -> list[SlotCommand]:
        match event:
            case JobClosed(number=number, record=content) if number == self._number and self._end is None:
                self._end = decode_end(content)
                self._arrive_at = None
                return [] if self._end.is_complete else self._stop(now)
            case JobStopped(number, why) if number == self._number and self._end is None:
                return self._close(JobEnd(exit_code=1, message=why))
            case HostDismissed(why):
                return self._dismissed(why, now)
        return []

    def _leave(self, grace: float, why: str, now: float) -> list[SlotCommand]:
        if self._is_leaving:
            return self._signal(signal.SIGKILL)
        self._is_leaving, self._leave_at, self._arrive_at = True, now + grace, None
        return [PrintLine(f"{why}; its ranks get SIGTERM"), NotifyLeader(HostDraining(self._host))]

    def _over(self) -> list[SlotCommand]:
        has_ended = self._end is not None or self._is_leaving
        if not has_ended or (self._world is not None and self._world.running):
            return []
        is_placed = self._world is not None and not self._world.is_done
        if self._end is None and is_placed and self._leave_at is not None:
            return []  # it waits for its turn to leave
        self._is_over = True
        return [RanksOver(self._end)]


def _certified(hosts: list[HostRanks]) -> tuple[int, ...] | None:
    """Return the numbers in the certificates of the ranks of a world, None if there are none."""
    parts = [ranks.certified for ranks in hosts]
    return None if None in parts else tuple(number for part in parts if part is not None for number in part)
