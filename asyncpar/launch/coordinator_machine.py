"""The decisions for the whole job: when ranks start, stop and restart, when the job ends, and its exit code.

Sans-I/O: ``handle`` takes events and returns commands.  Phases: *forming* (agents arrive), *running* (ranks of one
generation run), *stopping* (every agent ends its ranks), *finished*.  A failure anywhere stops everything; when nothing
runs any more, the job starts again with the next generation, or ends with the exit code of the rank that failed first.
The hosts are fixed: where they may come and go, agents run the job (``launch/agents``).
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from asyncpar.core.observe.agent_line import Loss
from asyncpar.core.observe.rank_reports import Phase
from asyncpar.launch.failure import (
    LEFT_EARLY,
    RankEnd,
    add_leavers,
    choose_first,
    describe,
    describe_cause,
    exit_code_of,
)
from asyncpar.launch.protocol import (
    AgentArrived,
    AgentAssignment,
    AgentHello,
    AgentLost,
    AgentStopped,
    AnnounceCondition,
    AnnounceExit,
    Announcement,
    CallerRefused,
    Command,
    CoordinatorTick,
    Event,
    GiveUpRank,
    JobInterrupted,
    JobOutcome,
    OpenGeneration,
    Order,
    RankChanged,
    RankEnded,
    RankReported,
    SendOrder,
    StopRanks,
)
from asyncpar.launch.vitals import NO_LIMITS, RankState, SilenceLimits, SilentRanks
from asyncpar.launch.wait_board import WaitBoard, WaitReport
from asyncpar.net.membership.host_arrivals import HostArrivals

_BLAME_PATIENCE = 1.0
"""Seconds to wait for the failure of the rank that a failed rank blames."""
_STOP_MARGIN = 15.0
"""Seconds beyond the grace period that agents have to report that their ranks are gone."""

_LATE = JobOutcome(1, "the job has ended already")


class JobPhase(StrEnum):
    """The phase of the job."""

    FORMING = "forming"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """Settings of the coordinator; times in seconds.

    Only restarts within ``restart_window`` count (None: all).
    ``version`` is that of the coordinator's package, which all agents must have.
    """

    job: str
    nnodes: int
    max_restarts: int = 0
    restart_window: float | None = None
    timeout: float = 300.0
    grace: float = 10.0
    silence: SilenceLimits = NO_LIMITS
    reconnect: float = 5.0
    version: str = ""


class CoordinatorMachine:
    """The decisions for one job.  ``outcome`` is None until it is finished."""

    def __init__(self, settings: JobSettings, *, now: float) -> None:
        self._settings = settings
        self._phase = JobPhase.FORMING
        self._agents: dict[int, AgentHello] = {}
        self._offsets: dict[int, int] = {}
        self._generation = 0
        self._restarts = 0
        self._restarted: list[float] = []
        self._may_restart = True
        self._running: set[int] = set()
        self._unstopped: set[int] = set()
        self._failures: list[RankEnd] = []
        self._done: dict[int, RankEnd] = {}
        """Ranks that ended with code 0 before all were asked to end."""
        self._has_joined: set[int] = set()
        self._has_left: set[int] = set()
        """Ranks that report that they have left the world."""
        self._late: list[RankEnd] = []
        """Ranks that failed after all were asked to end; they explain nothing."""
        self._silent = SilentRanks(settings.silence)
        self._waits = WaitBoard()
        self._arrivals = HostArrivals()
        self._give_up: dict[int, str] = {}
        self._stopped_at: float | None = None
        self._stop_reason = ""
        """Why the ranks of the last generation were stopped."""
        self._forced: JobOutcome | None = None
        self._deadline: float | None = now + settings.timeout
        self.outcome: JobOutcome | None = None

    @property
    def phase(self) -> JobPhase:
        return self._phase

    @property
    def failures(self) -> tuple[RankEnd, ...]:
        """The ranks of this generation that failed: the one that explains the others, then those in order of time."""
        if not self._failures:
            return ()
        first = choose_first(self._failures, self._late)
        others = [end for end in (*self._failures, *self._late) if end is not first]
        return (first, *sorted(others, key=lambda end: (end.at, end.rank)))

    @property
    def next_deadline(self) -> float | None:
        """When a ``CoordinatorTick`` is due; None: never."""
        is_running = self._phase == JobPhase.RUNNING
        silent = self._silent.next_deadline if is_running else None
        news = self._waits.next_deadline if is_running else None
        if self._phase == JobPhase.FORMING:
            news = self._arrivals.next_deadline
        return min((at for at in (self._deadline, silent, news) if at is not None), default=None)

    def handle(self, event: Event, *, now: float) -> list[Command]:
        if self._phase == JobPhase.FINISHED:
            return [SendOrder(event.agent, _LATE)] if isinstance(event, AgentArrived) else []
        match event:
            case AgentArrived(agent, hello):
                return self._arrive(agent, hello, now)
            case AgentLost(agent, cause):
                return self._lose(agent, cause, now)
            case RankEnded(agent, end):
                return self._rank_ended(agent, end, now)
            case AgentStopped(agent, generation):
                return self._agent_stopped(agent, generation, now)
            case JobInterrupted(agent, signal_number):
                return self._interrupted(agent, signal_number, now)
            case RankChanged(agent, state):
                return self._rank_changed(agent, state, now)
            case CallerRefused(who, why):
                return self._refused(who, why)
            case RankReported(agent, report):
                return self._rank_reported(agent, report, now)
            case CoordinatorTick():
                return self._tick(now)

    def host_of(self, rank: int) -> str:
        """Return the host of a rank, "" if no agent has it."""
        return next((hello.host for agent, hello in self._agents.items() if self._runs(agent, rank)), "")

    # -- forming

    def _arrive(self, agent: int, hello: AgentHello, now: float) -> list[Command]:
        refusal = self._judge(hello)
        if refusal is not None:
            refused = self._refused(f"the agent on {hello.host}", refusal)
            return [SendOrder(agent, JobOutcome(2, refusal)), *refused]
        self._agents[agent] = hello
        self._arrivals.change(now)
        return self._begin() if len(self._agents) == self._settings.nnodes else []

    def _refused(self, who: str, why: str) -> list[Command]:
        text = self._arrivals.refuse(who, why)
        return self._send_all(Announcement(text), self._agents) if text else []

    def _judge(self, hello: AgentHello) -> str | None:
        settings = self._settings
        if hello.version != settings.version:
            return f"the coordinator has asyncpar {settings.version}, this agent {hello.version}; install the same"
        if hello.job != settings.job:
            return f"--rdzv-id: the coordinator runs job {settings.job!r}, this agent came for {hello.job!r}"
        if hello.nnodes != settings.nnodes:
            return f"--nnodes: the coordinator expects {settings.nnodes}, this agent says {hello.nnodes}"
        if len(self._agents) >= settings.nnodes or self._phase != JobPhase.FORMING:
            return f"--nnodes: all {settings.nnodes} agents of the job are there already"
        for other in self._agents.values():
            if hello.node_rank is not None and other.node_rank == hello.node_rank:
                return f"--node-rank: {hello.node_rank} is taken by an agent on {other.host}"
        return None

    def _begin(self) -> list[Command]:
        """Start the ranks of the current generation everywhere."""
        self._arrivals.end()
        places = self._places()
        world_size = sum(hello.nproc for hello in self._agents.values())
        self._phase, self._deadline, self._stopped_at = JobPhase.RUNNING, None, None
        self._running, self._unstopped, self._failures = set(range(world_size)), set(places), []
        self._late = []
        self._done.clear()
        self._has_joined.clear()
        self._has_left.clear()
        self._silent.clear()
        self._waits.clear()
        self._give_up.clear()
        commands: list[Command] = [OpenGeneration(self._generation, world_size, self._restarts, self._stop_reason)]
        offset = 0
        for group_rank, agent in enumerate(places):
            self._offsets[agent] = offset
            assignment = AgentAssignment(
                generation=self._generation,
                restart_count=self._restarts,
                group_rank=group_rank,
                group_world_size=len(places),
                rank_offset=offset,
                world_size=world_size,
            )
            commands.append(SendOrder(agent, assignment))
            offset += self._agents[agent].nproc
        return commands

    def _places(self) -> list[int]:
        """Return the agents in the order of their places; those without a preference fill the gaps as they came."""
        places = {hello.node_rank: agent for agent, hello in self._agents.items() if hello.node_rank is not None}
        free = (place for place in range(self._settings.nnodes) if place not in places)
        places |= zip(free, [agent for agent, hello in self._agents.items() if hello.node_rank is None], strict=False)
        return [places[place] for place in sorted(places)]

    # -- running

    def _rank_ended(self, agent: int, end: RankEnd, now: float) -> list[Command]:
        rank = end.rank
        if not self._runs(agent, rank) or end.generation != self._generation or rank not in self._running:
            return []
        self._running.discard(rank)
        self._silent.forget(rank)
        self._waits.forget(rank, now)
        has_failed = end.returncode != 0
        if has_failed and rank in self._give_up:
            end = replace(end, lost=f"{self._give_up[rank]}, so the launcher killed it")
        if not has_failed and (self._phase == JobPhase.RUNNING or end.at <= (self._stopped_at or now)):
            self._done[rank] = end
        # a signal for the job reaches ranks one by one: one that ends first is no failure of those that still join
        is_asked_to = self._forced is not None
        commands: list[Command] = [] if is_asked_to else [AnnounceExit(end.generation, rank, end.ending)]
        if self._phase == JobPhase.STOPPING:
            if has_failed and (end.report is not None or end.lost):
                is_late = end.at > (self._stopped_at or now)
                (self._late if is_late else self._failures).append(end)
            self._blame_leavers()
            return commands
        if has_failed:
            self._failures.append(end)
        self._blame_leavers()
        return commands + self._consider(now)

    def _blame_leavers(self) -> None:
        """Add to the failures the ranks that ended with code 0 and explain some of them."""
        self._failures = add_leavers(self._failures, self._done.values())

    def _blame_living_leavers(self) -> None:
        """Add blamed ranks that have left the world, but still run, to the failures if nothing else explains these."""
        if not self._failures or not all(failure.is_peer_error for failure in self._failures):
            return
        blamed = {failure.blames for failure in self._failures}
        for rank in sorted(self._has_left & self._running & blamed):
            agent = next(agent for agent in self._agents if self._runs(agent, rank))
            local_rank = rank - self._offsets[agent]
            self._failures.append(
                self._lost_rank(self._agents[agent], local_rank, rank, LEFT_EARLY, self._stopped_at or 0.0)
            )

    def _rank_changed(self, agent: int, state: RankState, now: float) -> list[Command]:
        rank = state.rank
        is_known = self._runs(agent, rank) and state.generation == self._generation and rank in self._running
        if is_known and state.phase is Phase.MEMBER:
            self._has_joined.add(rank)
        if is_known and state.phase is Phase.LEFT and rank in self._has_joined:  # otherwise it never got that far
            self._has_left.add(rank)
        if self._phase == JobPhase.RUNNING and is_known and rank not in self._give_up:
            self._silent.take(state, now=now)
            before = self._waits.condition(rank)
            self._waits.set_condition(rank, state.describe(), now)
            return self._announce_condition(rank, before)
        return []

    def _rank_reported(self, agent: int, report: WaitReport, now: float) -> list[Command]:
        is_known = (
            self._runs(agent, report.rank) and report.generation == self._generation and report.rank in self._running
        )
        if self._phase != JobPhase.RUNNING or not is_known:
            return []
        before = self._waits.condition(report.rank)
        self._waits.take(report, now)
        return self._announce_condition(report.rank, before)

    def _announce_condition(self, rank: int, before: str) -> list[Command]:
        """Report the condition of a rank that cannot report it itself to all ranks, if it has changed."""
        how = self._waits.condition(rank)
        return [] if how == before else self._send_all(AnnounceCondition(self._generation, rank, how), self._unstopped)

    def _condemn(self, rank: int, how: str) -> list[Command]:
        """Give up a rank that does not run: it is killed, and the others are notified."""
        self._give_up[rank] = how
        self._silent.forget(rank)
        owner = next(agent for agent in self._agents if self._runs(agent, rank))
        loss = Loss(rank, self._agents[owner].host, how)
        return self._send_all(GiveUpRank(self._generation, loss), self._agents)

    def _runs(self, agent: int, rank: int) -> bool:
        """Return whether ``rank`` runs under ``agent``; reports about other ranks are ignored."""
        hello, offset = self._agents.get(agent), self._offsets.get(agent)
        return hello is not None and offset is not None and 0 <= rank - offset < hello.nproc

    def _consider(self, now: float) -> list[Command]:
        """Stop if it is clear which rank failed; end if all ranks are through."""
        if not self._failures:
            return self._end(JobOutcome(0)) if not self._running else []
        if self._running and all(failure.is_peer_error for failure in self._failures):
            if self._deadline is None:
                self._deadline = now + _BLAME_PATIENCE
            if now < self._deadline:
                return []
        return self._stop(now)

    def _stop(self, now: float, signal_number: int = signal.SIGTERM, reason: str = "") -> list[Command]:
        self._phase, self._stopped_at = JobPhase.STOPPING, now
        self._deadline = now + self._settings.grace + _STOP_MARGIN
        loss = None
        if not reason:
            self._blame_living_leavers()
            first = choose_first(self._failures)
            reason = f"rank {first.rank} on {first.host} {first.ending}"
            loss = Loss(first.rank, first.host, first.ending)
        order = StopRanks(self._generation, signal_number, reason, loss)
        return self._send_all(order, self._unstopped) or self._all_stopped(now)

    def _lose(self, agent: int, cause: str, now: float) -> list[Command]:
        hello = self._agents.pop(agent, None)
        if hello is None:
            return []
        if self._phase == JobPhase.FORMING:
            self._arrivals.change(now)
            return []
        offset = self._offsets[agent]
        lost = f"was lost with the agent on {hello.host} ({cause})"
        for local_rank in range(hello.nproc):
            rank = offset + local_rank
            explains = self._phase == JobPhase.RUNNING or all(failure.is_peer_error for failure in self._failures)
            if rank in self._running and explains and self._forced is None:
                self._failures.append(self._lost_rank(hello, local_rank, rank, lost, now))
            self._running.discard(rank)
        self._unstopped.discard(agent)
        if self._phase == JobPhase.STOPPING:
            return [] if self._unstopped else self._all_stopped(now)
        return self._consider(now)

    def _lost_rank(self, hello: AgentHello, local_rank: int, rank: int, why: str, at: float) -> RankEnd:
        """Return the end of a rank that is lost to the others, though its process may still run."""
        return RankEnd(
            generation=self._generation,
            rank=rank,
            local_rank=local_rank,
            host=hello.host,
            pid=0,
            returncode=1,
            at=at,
            lost=why,
        )

    def _interrupted(self, agent: int, signal_number: int, now: float) -> list[Command]:
        if agent not in self._agents or self._forced is not None:
            return []
        host, name = self._agents[agent].host, signal.Signals(signal_number).name
        self._forced = JobOutcome(exit_code_of(-signal_number), f"the agent on {host} got {name}")
        if self._phase == JobPhase.FORMING:
            return self._end(self._forced)
        return self._stop(now, signal_number, self._forced.message) if self._phase == JobPhase.RUNNING else []

    # -- stopping

    def _agent_stopped(self, agent: int, generation: int, now: float) -> list[Command]:
        if agent not in self._agents or generation != self._generation:
            return []
        self._unstopped.discard(agent)
        return self._all_stopped(now) if self._phase == JobPhase.STOPPING and not self._unstopped else []

    def _all_stopped(self, now: float) -> list[Command]:
        """Restart the job or end it, once no rank runs."""
        if self._forced is not None:
            return self._end(self._forced)
        self._stop_reason = describe_cause(self._failures)
        if len(self._agents) < self._settings.nnodes or self._has_used_up_restarts(now):
            return self._end(JobOutcome(choose_first(self._failures).exit_code, self._describe()))
        self._restarts += 1
        self._restarted.append(now)
        announced = self._send_all(Announcement(self._describe()), self._agents)
        self._generation += 1
        return announced + self._begin()

    def _describe(self) -> str:
        """Return the message about the failures of this generation."""
        return describe(self._failures, self._late)

    def _has_used_up_restarts(self, now: float) -> bool:
        window = self._settings.restart_window
        counted = [at for at in self._restarted if window is None or at > now - window]
        return not self._may_restart or len(counted) >= self._settings.max_restarts

    def _tick(self, now: float) -> list[Command]:
        if self._phase == JobPhase.RUNNING and (silent := self._silent.expired(now)):
            return [command for rank, how in silent for command in self._condemn(rank, how)]
        if self._phase == JobPhase.RUNNING and (lines := self._waits.report(now)):
            return [command for line in lines for command in self._send_all(Announcement(line), self._agents)]
        if self._deadline is None or now < self._deadline:
            text = self._report_arrivals(now) if self._phase == JobPhase.FORMING else ""
            return self._send_all(Announcement(text), self._agents) if text else []
        match self._phase:
            case JobPhase.FORMING:
                return self._end(JobOutcome(1, self._describe_absent()))
            case JobPhase.RUNNING:
                return self._stop(now)
            case _:
                self._unstopped.clear()
                self._may_restart = False  # agents that fail to stop their ranks cannot start them again
                return self._all_stopped(now)

    def _report_arrivals(self, now: float) -> str:
        hosts = [hello.host for hello in self._agents.values()]
        return self._arrivals.report(hosts, self._settings.nnodes, now, absent=self._absent_places())

    def _absent_places(self) -> list[int]:
        """Return the places of the agents that are missing, none if those that are here do not all have one."""
        taken = {hello.node_rank for hello in self._agents.values()}
        absent = [place for place in range(self._settings.nnodes) if place not in taken]
        return absent if len(absent) == self._settings.nnodes - len(self._agents) else []

    def _describe_absent(self) -> str:
        settings, absent = self._settings, self._absent_places()
        wanted = settings.nnodes - len(self._agents)
        who = f"node rank {', '.join(map(str, absent))}" if absent else f"{wanted} of {settings.nnodes} agents"
        hosts = ", ".join(hello.host for hello in self._agents.values()) or "nobody"
        return (
            f"waited {settings.timeout:g} s for {settings.nnodes} agents (--nnodes); missing: {who}; present: {hosts}. "
            "Start the missing ones with the same --rdzv-endpoint and --rdzv-id"
        )

    def _end(self, outcome: JobOutcome) -> list[Command]:
        self._phase, self._deadline, self.outcome = JobPhase.FINISHED, None, outcome
        return self._send_all(outcome, self._agents)

    @staticmethod
    def _send_all(order: Order, agents: Iterable[int]) -> list[Command]:
        return [SendOrder(agent, order) for agent in sorted(agents)]
