"""The decisions of one host about the ranks of a job that start again with every world (``--elastic restart``).

Sans-I/O.  The host as a whole is one member: it arrives, starts its ranks when a world has begun, ends them when it is
revoked, and reports.  So programs need not know of worlds, as under torchrun.  The only state of such a member is the
number of worlds so far, which is equal on all hosts; this is its lineage.

Hosts notify each other of the ends, conditions and waits of their ranks (``restarted_world.py``), so each of them knows
which rank of all failed first.  The host of that rank counts the restart and, when there are no more, ends the job.
How many restarts there were goes with each host into the next world, and the largest number counts.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec

from asyncpar.core.addresses import split_address
from asyncpar.core.observe.agent_line import Loss
from asyncpar.core.observe.rank_reports import Phase
from asyncpar.hosts.lineage import Lineage, MemberReport
from asyncpar.hosts.messages import (
    ChangePending,
    HostDismissed,
    HostDraining,
    HostLost,
    HostParked,
    JobClosed,
    JobStopped,
    MemberArrived,
    MemberDismissed,
    MemberLeft,
    MemberNotice,
    MemberProgressed,
    MemberReady,
    MemberReported,
    MembersWanted,
    MemberWaits,
    WorldAnnounced,
    WorldEnded,
    WorldNotice,
    WorldStarted,
    shown_host,
)
from asyncpar.hosts.restart_budget import RestartBudget
from asyncpar.launch.agents.host_protocol import (
    AbandonRank,
    AnnounceExit,
    HostTick,
    InterruptRanks,
    LeaveHost,
    NotifyLeader,
    NotifyOfCondition,
    NotifyRanks,
    OpenRendezvous,
    PrintLine,
    RankGone,
    RankPlace,
    RanksOver,
    ShowWorld,
    SignalRank,
    SlotCommand,
    SlotEvent,
    StartRank,
    StateChanged,
    WaitChanged,
)
from asyncpar.launch.agents.job_record import JobEnd, SubmittedJob, decode_end, encode_record
from asyncpar.launch.agents.restarted_world import (
    ConditionNotice,
    DoneNotice,
    EndNotice,
    HostRanks,
    HostReadiness,
    LeftNotice,
    LossNotice,
    Notice,
    RestartedWorld,
    WaitsNotice,
    decode_notice,
    encode_notice,
    name_notice,
)
from asyncpar.launch.failure import RankEnd, describe_cause
from asyncpar.launch.vitals import Condition, RankState, SilentRanks, describe_state
from asyncpar.launch.wait_board import WaitReport, name_missing

_ANSWER_SECONDS = 3.0
"""Seconds that an interrupted launcher without ranks waits until the group has ended the job."""
_JOB = "job"
"""The budget of restarts is the job's."""


class RestartedRanks:
    """The ranks of one job on ``host``; ``own`` are those that it adds to each world.

    Without a quorum they are stopped until there is one again; the job ends here after ``parked_within`` seconds of it
    (None: never).  A launcher prints as one (``is_launcher``), an agent that outlives jobs what changes in the group.
    """

    def __init__(
        self,
        number: int,
        record: SubmittedJob,
        *,
        host: str,
        own: HostRanks,
        free_port: Callable[[], int],
        draw: Callable[[], str],
        parked_within: float | None = None,
        is_launcher: bool = False,
        missing: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        """``missing`` returns the ranks that have not joined the world whose rendezvous is served here."""
        self._number = number
        self._record = record
        self._host = host
        self._own = own
        self._free_port = free_port
        self._draw = draw
        self._budget = RestartBudget[str](most=record.max_restarts, window=record.restart_window)
        self._member: str | None = None
        self._lineage = Lineage(0, b"")
        self._world: RestartedWorld | None = None
        self._arrive_at: float | None = None
        self._end: JobEnd | None = None
        self._is_leaving = False
        self._parked_within = parked_within
        self._is_launcher = is_launcher
        self._missing = missing
        self._interrupted: int | None = None
        """The signal that ends the job, which this launcher got."""
        self._alone_at: float | None = None
        """When an interrupted launcher without ranks ends although it cannot learn that the job has."""
        self._hosts: int | None = None
        """The number of hosts of the last world that has started."""
        self._reason = ""
        """Why the ranks of the last world ended."""
        self._last: JobEnd | None = None
        """The end of the job if there can be no further world."""
        self._described = ""
        """The failure in the last world, which a launcher prints as the next one begins, or as the end of the job."""
        self._is_parked = False
        self._give_up_at: float | None = None
        self._leave_at: float | None = None
        self._is_over = False
        self._restarts = 0
        """The restarts of the job after failures, as far as this host knows."""
        self._unexplained: JobEnd | None = None
        """The failures of a world in which ranks of this host have only lost others."""
        self._notices = 0

    @property
    def next_deadline(self) -> float | None:
        """See ``SlotsMachine``."""
        times = [self._arrive_at, self._leave_at, self._give_up_at, self._alone_at]
        times += [] if self._world is None else [self._world.next_deadline]
        return min((at for at in times if at is not None), default=None)

    @property
    def restarts(self) -> dict[int, int]:
        """The number of restarts of each slot: all ranks of the job start again together."""
        return dict.fromkeys(range(self._own.slots), self._restarts)

    @property
    def ranks(self) -> dict[int, int]:
        """The ranks of the slots that run."""
        if self._world is None or not self._world.has_started:
            return {}
        offset = self._world.offset
        return {slot: offset + slot for slot in sorted(self._world.running)}

    @property
    def spares(self) -> frozenset[int]:
        """Always empty: ranks that start with their world are soon there."""
        return frozenset()

    @property
    def refusals(self) -> dict[int, str]:
        """Always empty: others admit every rank of their world."""
        return {}

    @property
    def failures(self) -> tuple[RankEnd, ...]:
        """The ranks of all hosts that have failed in the last world; the one that explains the others comes first."""
        return () if self._world is None else self._world.all_failures

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
            case StateChanged(slot, state):
                commands = [] if self._is_parked else self._state_changed(slot, state, now)
            case WaitChanged(report):
                commands = self._notify(WaitsNotice(report))
            case LeaveHost() | InterruptRanks():
                commands = self._asked_to_end(event, now)
            case HostTick():
                commands = self._tick(now)
            case JobClosed() | JobStopped() | HostDismissed() | HostLost() | MembersWanted():
                commands = self._job_changed(event, now)
            case HostParked(why):
                commands = self._park(bool(why), now)
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
        arrived = MemberArrived(
            member=self._member, host=self._host, lineage=self._lineage, address=address, place=self._own.place
        )
        return [NotifyLeader(arrived), NotifyLeader(MemberProgressed(self._member, self._lineage))]

    def _world_changed(self, event: SlotEvent, now: float) -> list[SlotCommand]:
        match event:
            case WorldAnnounced():
                return self._announced(event, now)
            case WorldStarted(generation, addresses) if self._is_in(generation):
                return self._started(addresses, now)
            case WorldEnded(generation, why) if self._is_in(generation):
                return self._ended(why, now)
            case ChangePending(generation) if self._is_in(generation):
                return self._ended("a host joins or leaves", now)
            case MemberDismissed(member, why, is_drained) if member == self._member:
                return self._dismissed("" if is_drained else why, now)
            case MemberWaits(member, why) if member == self._member:
                return [PrintLine(f"this host waits: {why}")]
            case WorldNotice(generation=generation, notice=notice) if self._is_in(generation):
                return self._noticed(notice, now)
        return []

    def _is_in(self, generation: int) -> bool:
        return self._world is not None and self._world.announced.generation == generation

    def _announced(self, announced: WorldAnnounced, now: float) -> list[SlotCommand]:
        self._lineage = Lineage(announced.generation + 1, b"")
        printed: list[SlotCommand] = (
            [] if self._is_launcher else [PrintLine(f"{announced.change}; {_hosts(announced)}")]
        )
        names = [placed.name for placed in announced.members]
        if self._member is None:
            return printed
        if self._member not in names:
            is_waiting = self._world is None
            return [*printed, NotifyLeader(MemberProgressed(self._member, self._lineage))] if is_waiting else printed
        if (end := self._judge(announced, now)) is not None:
            return [*printed, *self._close(end)]
        world = self._world = RestartedWorld(announced, self._member, silent=SilentRanks(self._record.silence))
        if names[0] != self._member:
            return [*printed, self._ready(announced.generation, port=0)]
        ready = self._ready(announced.generation, port=self._free_port())
        return [*printed, OpenRendezvous(announced.generation, world.size, world.certified), ready]

    def _judge(self, announced: WorldAnnounced, now: float) -> JobEnd | None:
        """Count failures that no change of hosts explains; return the end of the job if there were too many.

        Ranks that lose each other although all are there would otherwise start again for ever.  Where the number of
        hosts is fixed, the first one decides, now that all ranks have ended and it is known what else has failed.
        """
        end, self._unexplained = self._unexplained, None
        if end is not None and self._record.is_fixed and self._world is not None:
            _, end = self._world.judge()
            self._described = end.message
            return end if self._leads and not self._count(now) else None
        is_same = not announced.change.left and not announced.change.joined
        return end if end is not None and is_same and not self._count(now) else None

    def _count(self, now: float) -> bool:
        """Count a restart of the job; return whether it is allowed."""
        self._restarts += 1
        return self._budget.crash(_JOB, now) is not None

    def _ready(self, generation: int, *, port: int) -> NotifyLeader:
        readiness = msgspec.json.encode(HostReadiness(restarts=self._restarts, port=port)).decode()
        return NotifyLeader(MemberReady(str(self._member), generation, readiness))

    def _started(self, addresses: tuple[str, ...], now: float) -> list[SlotCommand]:
        world = self._world
        assert world is not None
        if world.is_over or world.has_started or self._interrupted is not None:
            return []
        ready = [msgspec.json.decode(address, type=HostReadiness) for address in addresses]
        while self._restarts < max(one.restarts for one in ready):
            self._count(now)  # another host has counted it first
        first, offset, size, certified = world.hosts[0], world.offset, world.size, world.certified
        world.has_started, world.running = True, set(range(self._own.slots))
        before, self._hosts = self._hosts, len(world.members)
        reason = "" if before is None else self._reason
        printed: list[SlotCommand] = [ShowWorld(world.announced.generation, size, self._restarts, reason)]
        if self._is_launcher and before is not None:
            printed += [PrintLine(self._described)] if self._described else []
            self._described = ""
            on = "" if before == self._hosts else f" on {_hosts(world.announced)}"
            restarts = f" (restart {self._restarts})" if self._restarts else ""
            printed.append(PrintLine(f"starting all ranks again{on}{restarts}"))
        starts = [
            StartRank(
                slot,
                str(self._member),
                RankPlace(
                    generation=world.announced.generation,
                    rank=offset + slot,
                    world_size=size,
                    group_rank=world.members.index(str(self._member)),
                    group_world_size=len(world.members),
                    rendezvous=first.rendezvous,
                    master_addr=first.master or split_address(first.rendezvous)[0],
                    master_port=ready[0].port,
                    restarts=self._restarts,
                    certified=certified,
                    rendezvous_role=first.role,
                ),
            )
            for slot in range(self._own.slots)
        ]
        return [*printed, *starts]

    def _ended(self, why: str, now: float) -> list[SlotCommand]:
        """End the ranks of a world that is over, then report."""
        world = self._world
        assert world is not None
        if world.is_over or self._end is not None:
            return []
        world.is_over, world.why, self._reason = True, why, why
        if not world.running:
            return self._report()
        if world.signalled_at is not None:  # for the failure that is the reason
            return []
        return [PrintLine(f"{why}; stopping all ranks"), *self._stop(now)]

    def _report(self) -> list[SlotCommand]:
        world = self._world
        assert world is not None
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

    # -- notices -------------------------------------------------------------------------------------------------------

    def _notify(self, notice: Notice) -> list[SlotCommand]:
        """Notify all hosts of this world, this one included; when it is over, of the ends of ranks only."""
        world = self._world
        if world is None or self._member is None or (world.is_over and not isinstance(notice, EndNotice)):
            return []
        self._notices += 1
        given = MemberNotice(
            member=self._member,
            generation=world.announced.generation,
            name=name_notice(notice),
            number=self._notices,
            content=encode_notice(notice),
        )
        return [NotifyLeader(given)]

    def _noticed(self, given: MemberNotice, now: float) -> list[SlotCommand]:
        world = self._world
        assert world is not None
        if not world.is_new(given.member, given.name, given.number):
            return []
        notice = decode_notice(given.content)
        if world.is_over:
            if isinstance(notice, EndNotice) and given.member != self._member:
                world.add_end(replace(notice.end, at=now - notice.age), now, was_asked=notice.was_asked)
            return []
        match notice:
            case EndNotice(end, age, was_asked):
                return self._rank_ended(given.member, replace(end, at=now - age), now, was_asked=was_asked)
            case ConditionNotice(rank, how):
                before = world.waits.condition(rank)
                world.waits.set_condition(rank, how, now)
                return self._announce_condition(rank, before)
            case LossNotice(loss):
                is_own = given.member == self._member
                return [] if is_own else [PrintLine(f"rank {loss.rank} {loss.how}; killing it"), NotifyRanks(loss)]
            case WaitsNotice(report):
                return self._rank_waits(report, now)
            case LeftNotice(rank):
                world.left.add(rank)
                return []
            case DoneNotice():
                world.done_hosts.add(given.member)
                is_complete = world.done_hosts.issuperset(world.members)
                return self._close(JobEnd(exit_code=0)) if is_complete else []

    def _rank_waits(self, report: WaitReport, now: float) -> list[SlotCommand]:
        """Record a report; if its rank waits for the world, the first host names the one that is missing."""
        world = self._world
        assert world is not None
        if world.members[0] == self._member:
            named = name_missing(report, self._missing(), world.host_of)
            if named != report:
                world.named.add(report.rank)
                return self._notify(WaitsNotice(named))
            if report.notice is None and report.rank in world.named:  # supersedes the notice that has named another
                world.named.discard(report.rank)
                return self._notify(WaitsNotice(report))
        before = world.waits.condition(report.rank)
        world.waits.take(report, now)
        return self._announce_condition(report.rank, before)

    def _announce_condition(self, rank: int, before: str) -> list[SlotCommand]:
        assert self._world is not None
        how = self._world.waits.condition(rank)
        return [] if how == before else [NotifyOfCondition(rank, how)]

    def _rank_ended(self, member: str, end: RankEnd, now: float, *, was_asked: bool) -> list[SlotCommand]:
        """Handle the end of a rank, which may be one of another host."""
        world = self._world
        assert world is not None
        world.waits.forget(end.rank, now)
        commands: list[SlotCommand] = []
        if world.members[0] == self._member:  # nobody waits for it in the rendezvous any more
            commands.append(AnnounceExit(end.generation, end.rank, end.ending))
        if member == self._member:
            return commands
        return commands + self._add_end(end, now, was_asked=was_asked)

    def _add_end(self, end: RankEnd, now: float, *, was_asked: bool = False) -> list[SlotCommand]:
        world = self._world
        assert world is not None
        is_ending = was_asked or world.is_over or world.signalled_at is not None
        is_reason = bool(end.returncode) and not end.is_peer_error and not is_ending
        world.add_end(end, now, was_asked=was_asked)
        if not is_reason:
            return []
        return [*self._announce_stop(end), NotifyRanks(Loss(end.rank, end.host, end.ending))]

    def _announce_stop(self, first: RankEnd) -> list[SlotCommand]:
        """Print once why the ranks that still run here are stopped."""
        world = self._world
        assert world is not None
        if world.has_announced_stop or not world.running:
            return []
        world.has_announced_stop = True
        return [PrintLine(f"rank {first.rank} on {first.host} {first.ending}; stopping all ranks")]

    def _state_changed(self, slot: int, state: RankState, now: float) -> list[SlotCommand]:
        world = self._world
        if world is None or slot not in world.running or slot in world.given_up:
            return []
        state = replace(state, rank=world.offset + slot)
        world.silent.take(state, now=now)
        commands: list[SlotCommand] = []
        if state.phase is Phase.LEFT and world.phases.get(slot) is Phase.MEMBER:  # otherwise it never got that far
            commands += self._notify(LeftNotice(state.rank))
        world.phases[slot] = state.phase
        if state.condition is world.conditions.get(slot, Condition.WELL):
            return commands
        world.conditions[slot] = state.condition
        commands.append(PrintLine(describe_state(state, self._record.silence)))
        return [*commands, *self._notify(ConditionNotice(state.rank, state.describe()))]

    def _give_up(self, rank: int, how: str) -> list[SlotCommand]:
        world = self._world
        assert world is not None
        slot, loss = rank - world.offset, Loss(rank, self._host, how)
        world.given_up[slot] = how
        world.silent.forget(rank)
        notices = self._notify(LossNotice(loss))
        return [
            *notices,
            PrintLine(f"rank {rank} {how}; killing it"),
            NotifyRanks(loss),
            SignalRank(slot, signal.SIGKILL),
        ]

    # -- processes -----------------------------------------------------------------------------------------------------

    def _signal(self, number: int) -> list[SlotCommand]:
        asks = number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT)
        numbers = [number, signal.SIGCONT] if asks and self._is_parked else [number]
        slots = [] if self._world is None else sorted(self._world.running)
        return [SignalRank(slot, one) for slot in slots for one in numbers]

    def _kill(self) -> list[SlotCommand]:
        return [] if self._world is None else [AbandonRank(slot) for slot in sorted(self._world.running)]

    def _stop(self, now: float, number: int = signal.SIGTERM) -> list[SlotCommand]:
        if self._world is not None and self._world.running:
            self._world.kill_at = now + self._record.grace
            self._world.signalled_at = now if self._world.signalled_at is None else self._world.signalled_at
        return self._signal(number)

    def _stop_for(self, end: JobEnd, now: float) -> list[SlotCommand]:
        """Stop the ranks since the job has ended on another host, or there is no world for them."""
        printed: list[SlotCommand] = []
        if end.interrupted and self._world is not None and self._world.running:
            printed.append(PrintLine(f"{end.message}; stopping all ranks"))
        return [*printed, *self._stop(now, end.signal_number)]

    def _interrupt(self, number: int, now: float) -> list[SlotCommand]:
        """Pass on a signal that this launcher got; the job ends with it."""
        if self._interrupted is not None:
            return self._signal(number)
        self._interrupted = number
        if self._world is None or not self._world.running:
            self._alone_at = now + _ANSWER_SECONDS
        return self._stop(now, number)

    def _gone(self, slot: int, end: RankEnd, now: float) -> list[SlotCommand]:
        world = self._world
        assert world is not None, "a process has a world"
        world.running.discard(slot)
        world.silent.forget(end.rank)
        if end.returncode and slot in world.given_up:
            end = replace(end, lost=f"{world.given_up[slot]}, so the launcher killed it")
        commands: list[SlotCommand] = []
        is_asked_to = self._interrupted is not None or self._end is not None
        if not is_asked_to:  # a rank that ends with its job has not failed
            was_asked = world.was_asked(end)
            if not was_asked or end.report is not None or end.lost:
                commands += self._notify(EndNotice(end, max(0.0, now - end.at), was_asked))
            commands += self._add_end(end, now, was_asked=was_asked)
        if world.running:
            return commands
        world.kill_at = None
        if self._member is None:
            self._world = None
            return commands
        if self._end is not None:
            return commands
        if self._interrupted is not None:
            self._alone_at = now + _ANSWER_SECONDS
            return commands
        if self._is_leaving:
            return [*commands, NotifyLeader(MemberLeft(self._member))]
        if world.failures:
            world.stop_at = None
            return commands + self._failed(now)
        return commands + (self._report() if world.is_over else self._notify(DoneNotice()))

    def _failed(self, now: float) -> list[SlotCommand]:
        world = self._world
        assert world is not None
        world.blame_leavers(now)
        first, end = world.judge()
        if world.lost_hosts and self._leads:
            return self._close(end)
        is_own = not (first.is_peer_error or self._record.is_fixed) and world.is_here(first.rank)
        if is_own and not self._count(now):
            return self._close(end)
        self._last, self._reason = end, describe_cause([first])
        self._unexplained = end if first.is_peer_error or self._record.is_fixed else None
        world.why = world.why or f"rank {first.rank} on {first.host} {first.ending}"
        if world.is_over:
            return self._report()
        world.is_over = True
        count = f" (restart {self._budget.crashes(_JOB)} of {self._budget.most})" if is_own else ""
        printed: list[SlotCommand] = []
        if not self._is_launcher and (is_own or first.is_peer_error):
            printed = [PrintLine(end.message), PrintLine(f"{world.why}; starting all ranks again{count}")]
        self._described = end.message
        return [*printed, *self._report()]

    # -- the end -------------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> list[SlotCommand]:
        commands: list[SlotCommand] = []
        if self._arrive_at is not None and now >= self._arrive_at and self._world is None:
            commands += self._arrive()
        if self._give_up_at is not None and now >= self._give_up_at and self._end is None:
            commands += self._give_up_job(now)
        if self._leave_at is not None and now >= self._leave_at:
            self._leave_at = None
            commands += self._stop(now)
        if self._alone_at is not None and now >= self._alone_at:
            self._alone_at, number = None, self._interrupted or signal.SIGTERM
            self._end = self._end or JobEnd(
                exit_code=128 + number, message="the job is interrupted", signal_number=number, interrupted=self._host
            )
        world = self._world
        if world is not None and world.stop_at is not None and now >= world.stop_at:
            world.stop_at = None
            if world.running:
                world.blame_leavers(now)
                first, _ = world.judge()
                commands += self._announce_stop(first)
            commands += self._stop(now)
            if not (world.running or world.is_over):  # they had ended before a rank of another host has failed
                commands += self._failed(now)
        if world is not None and world.kill_at is not None and now >= world.kill_at:
            world.kill_at = None
            late = f"ranks still run {self._record.grace:g} s after they were asked to end; killing them"
            commands += [PrintLine(late), *self._kill()]
        if world is not None and world.running and not self._is_parked:
            commands += [command for rank, how in world.silent.expired(now) for command in self._give_up(rank, how)]
        if world is not None and not world.is_over:
            commands += [PrintLine(line) for line in world.waits.report(now)]
        return commands

    def _close(self, end: JobEnd) -> list[SlotCommand]:
        return [NotifyLeader(JobClosed(number=self._number, record=encode_record(end)))]

    def _job_changed(
        self, event: JobClosed | JobStopped | HostDismissed | HostLost | MembersWanted, now: float
    ) -> list[SlotCommand]:
        match event:
            case HostLost(host, why):
                return self._lose_host(host, why, now)
            case MembersWanted() if self._record.is_fixed and self._leads and self._end is None:
                late = f"ranks still run {self._record.terms.report_within:g} s after they were asked to end"
                return self._close(self._last or JobEnd(exit_code=1, message=late))
            case JobClosed(number=number, record=content) if number == self._number and self._end is None:
                end = self._end = decode_end(content)
                self._arrive_at = None
                is_stopping = end.is_complete or self._interrupted is not None
                return [] if is_stopping else self._stop_for(end, now)
            case JobStopped(number, why) if number == self._number and self._end is None:
                return self._close(JobEnd(exit_code=1, message=why))
            case HostDismissed(why):
                return self._dismissed(why, now)
        return []

    @property
    def _leads(self) -> bool:
        """Whether this host is the first one of the world, which speaks for those that are lost."""
        return self._world is not None and self._world.members[0] == self._member

    def _lose_host(self, host: str, why: str, now: float) -> list[SlotCommand]:
        """Fail with the ranks of a lost host; the first host then ends the job, which cannot do without any."""
        world = self._world
        if world is None or self._end is not None:
            return []
        lost = world.lose_host(host, f"was lost with the agent on {shown_host(host)} ({why})", now)
        if world.is_over or not world.has_started:  # its ranks are not stopped any more
            if world.has_started and all(failure.is_peer_error for failure in world.failures):
                world.failures += lost
            end = self._last or JobEnd(exit_code=1, message=f"the agent on {shown_host(host)} was lost ({why})")
            end = world.judge()[1] if world.failures else end
            return self._close(end) if self._leads else []
        if self._interrupted is not None:
            return []
        commands: list[SlotCommand] = []
        for rank_end in lost:
            commands += [AnnounceExit(rank_end.generation, rank_end.rank, rank_end.ending)] if self._leads else []
            commands += self._add_end(rank_end, now)
        return commands

    def _park(self, is_parked: bool, now: float) -> list[SlotCommand]:
        self._is_parked, self._give_up_at = is_parked, None
        if self._world is not None:
            self._world.silent.clear()
        if is_parked and self._parked_within is not None:
            self._give_up_at = now + self._parked_within
        return self._signal(signal.SIGSTOP if is_parked else signal.SIGCONT)

    def _give_up_job(self, now: float) -> list[SlotCommand]:
        """End the job on this host: the others may go on without it, or have lost each other, too."""
        within, self._give_up_at, self._arrive_at = self._parked_within, None, None
        why = f"no quorum of the hosts was reached for {within:g} s (--reconnect-within); the job ends here"
        self._end = JobEnd(exit_code=1, message=why)
        return [PrintLine(why), *self._stop(now)]

    def _asked_to_end(self, event: LeaveHost | InterruptRanks, now: float) -> list[SlotCommand]:
        match event:
            case InterruptRanks(number):
                return self._interrupt(number, now)
            case LeaveHost() if self._is_leaving:
                return self._kill()
            case LeaveHost(grace, why):
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


def _hosts(announced: WorldAnnounced) -> str:
    count = len(announced.members)
    return f"{count} host{'s' if count != 1 else ''}"
