"""Decide for the whole job when ranks start, stop and restart, when the job ends, and its exit code.

Sans-I/O: ``handle`` takes events and returns commands.  Phases: *forming* (agents arrive), *running* (ranks of one
generation run), *stopping* (every agent ends its ranks), *finished*.  A failure anywhere stops everything; when nothing
is left running, the job starts again with the next generation, or ends with the exit code of the rank that failed
first.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from asyncpar.core.observe.agent_line import Loss
from asyncpar.launch.failure import RankEnd, choose_first, describe, exit_code_of
from asyncpar.launch.protocol import (
    AgentArrived,
    AgentAssignment,
    AgentHello,
    AgentLost,
    AgentStopped,
    AnnounceExit,
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
    SendOrder,
    StopRanks,
)
from asyncpar.launch.vitals import RankState, SilentRanks

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
    """Settings of the coordinator; times in seconds."""

    job: str
    nnodes: int
    max_restarts: int = 0
    timeout: float = 300.0
    grace: float = 10.0
    silent_after: float | None = 30.0
    reconnect: float = 5.0


class CoordinatorMachine:
    """The decisions for one job.  ``outcome`` is None until it is finished."""

    def __init__(self, settings: JobSettings, *, now: float) -> None:
        self._settings = settings
        self._phase = JobPhase.FORMING
        self._agents: dict[int, AgentHello] = {}
        self._offsets: dict[int, int] = {}
        self._generation = 0
        self._restarts = 0
        self._running: set[int] = set()
        self._unstopped: set[int] = set()
        self._failures: list[RankEnd] = []
        self._silent = SilentRanks(settings.silent_after)
        self._give_up: dict[int, str] = {}
        self._stopped_at: float | None = None
        self._forced: JobOutcome | None = None
        self._deadline: float | None = now + settings.timeout
        self.outcome: JobOutcome | None = None

    @property
    def phase(self) -> JobPhase:
        return self._phase

    @property
    def next_deadline(self) -> float | None:
        """When a ``CoordinatorTick`` is due, None if never."""
        silent = self._silent.next_deadline if self._phase == JobPhase.RUNNING else None
        return min((at for at in (self._deadline, silent) if at is not None), default=None)

    def handle(self, event: Event, *, now: float) -> list[Command]:
        if self._phase == JobPhase.FINISHED:
            return [SendOrder(event.agent, _LATE)] if isinstance(event, AgentArrived) else []
        match event:
            case AgentArrived(agent, hello):
                return self._arrive(agent, hello)
            case AgentLost(agent, cause):
                return self._lose(agent, cause, now)
            case RankEnded(agent, end):
                return self._rank_ended(agent, end, now)
            case AgentStopped(agent, generation):
                return self._agent_stopped(agent, generation)
            case JobInterrupted(agent, signal_number):
                return self._interrupted(agent, signal_number, now)
            case RankChanged(agent, state):
                return self._rank_changed(agent, state, now)
            case CoordinatorTick():
                return self._tick(now)

    # -- forming

    def _arrive(self, agent: int, hello: AgentHello) -> list[Command]:
        refusal = self._judge(hello)
        if refusal is not None:
            return [SendOrder(agent, JobOutcome(2, refusal))]
        self._agents[agent] = hello
        return self._begin() if len(self._agents) == self._settings.nnodes else []

    def _judge(self, hello: AgentHello) -> str | None:
        settings = self._settings
        if hello.job != settings.job:
            return f"--rdzv-id: the coordinator runs job {settings.job!r}, this agent came for {hello.job!r}"
        if hello.nnodes != settings.nnodes:
            return f"--nnodes: the coordinator expects {settings.nnodes}, this agent says {hello.nnodes}"
        if self._phase != JobPhase.FORMING:
            return f"--nnodes: all {settings.nnodes} agents of the job are there already"
        for other in self._agents.values():
            if hello.node_rank is not None and other.node_rank == hello.node_rank:
                return f"--node-rank: {hello.node_rank} is taken by an agent on {other.host}"
        return None

    def _begin(self) -> list[Command]:
        """Start the ranks of the current generation everywhere."""
        places = self._places()
        world_size = sum(hello.nproc for hello in self._agents.values())
        self._phase, self._deadline, self._stopped_at = JobPhase.RUNNING, None, None
        self._running, self._unstopped, self._failures = set(range(world_size)), set(places), []
        self._silent.clear()
        self._give_up.clear()
        commands: list[Command] = [OpenGeneration(self._generation, world_size)]
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
        """Return the agents in the order of their places; those without a wish fill the gaps as they came."""
        wishes = {hello.node_rank: agent for agent, hello in self._agents.items() if hello.node_rank is not None}
        rest = iter([agent for agent, hello in self._agents.items() if hello.node_rank is None])
        return [wishes[place] if place in wishes else next(rest) for place in range(self._settings.nnodes)]

    # -- running

    def _rank_ended(self, agent: int, end: RankEnd, now: float) -> list[Command]:
        rank = end.rank
        if not self._runs(agent, rank) or end.generation != self._generation or rank not in self._running:
            return []
        self._running.discard(rank)
        self._silent.forget(rank)
        has_failed = end.returncode != 0
        if has_failed and rank in self._give_up:
            end = replace(end, lost=f"{self._give_up[rank]}, so the launcher killed it")
        commands: list[Command] = [AnnounceExit(end.generation, rank, end.ending)]
        if self._phase == JobPhase.STOPPING:
            if has_failed and end.report is not None and end.at <= (self._stopped_at or now):
                self._failures.append(end)
            return commands
        if has_failed:
            self._failures.append(end)
        return commands + self._consider(now)

    def _rank_changed(self, agent: int, state: RankState, now: float) -> list[Command]:
        rank = state.rank
        is_known = self._runs(agent, rank) and state.generation == self._generation and rank in self._running
        if self._phase == JobPhase.RUNNING and is_known and rank not in self._give_up:
            self._silent.take(state, now=now)
        return []

    def _condemn(self, rank: int, how: str) -> list[Command]:
        """Give up a rank that does not run: it is killed, and the others hear of it."""
        self._give_up[rank] = how
        self._silent.forget(rank)
        owner = next(agent for agent in self._agents if self._runs(agent, rank))
        loss = Loss(rank, self._agents[owner].host, how)
        return self._tell_all(GiveUpRank(self._generation, loss), self._agents)

    def _runs(self, agent: int, rank: int) -> bool:
        """Does ``rank`` run under ``agent``?  Reports about other ranks are ignored."""
        hello, offset = self._agents.get(agent), self._offsets.get(agent)
        return hello is not None and offset is not None and 0 <= rank - offset < hello.nproc

    def _consider(self, now: float) -> list[Command]:
        """Stop if it is clear who failed; end if all ranks are through."""
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
            first = choose_first(self._failures)
            reason = f"rank {first.rank} on {first.host} {first.ending}"
            loss = Loss(first.rank, first.host, first.ending)
        order = StopRanks(self._generation, signal_number, reason, loss)
        return self._tell_all(order, self._unstopped) or self._all_stopped()

    def _lose(self, agent: int, cause: str, now: float) -> list[Command]:
        hello = self._agents.pop(agent, None)
        if hello is None or self._phase == JobPhase.FORMING:
            return []
        offset = self._offsets[agent]
        lost = f"was lost with the agent on {hello.host} ({cause})"
        for local_rank in range(hello.nproc):
            rank = offset + local_rank
            explains = self._phase == JobPhase.RUNNING or all(failure.is_peer_error for failure in self._failures)
            if rank in self._running and explains and self._forced is None:
                self._failures.append(
                    RankEnd(
                        generation=self._generation,
                        rank=rank,
                        local_rank=local_rank,
                        host=hello.host,
                        pid=0,
                        returncode=1,
                        at=now,
                        lost=lost,
                    )
                )
            self._running.discard(rank)
        self._unstopped.discard(agent)
        if self._phase == JobPhase.STOPPING:
            return [] if self._unstopped else self._all_stopped()
        return self._consider(now)

    def _interrupted(self, agent: int, signal_number: int, now: float) -> list[Command]:
        if agent not in self._agents or self._forced is not None:
            return []
        host = self._agents[agent].host
        name = signal.Signals(signal_number).name
        self._forced = JobOutcome(exit_code_of(-signal_number), f"the agent on {host} got {name}")
        if self._phase == JobPhase.FORMING:
            return self._end(self._forced)
        return self._stop(now, signal_number, self._forced.message) if self._phase == JobPhase.RUNNING else []

    # -- stopping

    def _agent_stopped(self, agent: int, generation: int) -> list[Command]:
        if agent not in self._agents or generation != self._generation:
            return []
        self._unstopped.discard(agent)
        return self._all_stopped() if self._phase == JobPhase.STOPPING and not self._unstopped else []

    def _all_stopped(self) -> list[Command]:
        """Restart the job or end it, when no rank runs any more."""
        if self._forced is not None:
            return self._end(self._forced)
        is_whole = len(self._agents) == self._settings.nnodes
        if is_whole and self._restarts < self._settings.max_restarts:
            self._restarts += 1
            self._generation += 1
            return self._begin()
        return self._end(JobOutcome(choose_first(self._failures).exit_code, describe(self._failures)))

    def _tick(self, now: float) -> list[Command]:
        if self._phase == JobPhase.RUNNING and (silent := self._silent.expired(now)):
            return [command for rank, how in silent for command in self._condemn(rank, how)]
        if self._deadline is None or now < self._deadline:
            return []
        match self._phase:
            case JobPhase.FORMING:
                return self._end(JobOutcome(1, self._absent()))
            case JobPhase.RUNNING:
                return self._stop(now)
            case _:
                self._unstopped.clear()
                self._agents_left()
                return self._all_stopped()

    def _agents_left(self) -> None:
        """Agents that do not manage to stop their ranks cannot start them again."""
        self._restarts = self._settings.max_restarts

    def _absent(self) -> str:
        settings = self._settings
        taken = {hello.node_rank for hello in self._agents.values()}
        absent = [str(place) for place in range(settings.nnodes) if place not in taken]
        wanted = settings.nnodes - len(self._agents)
        who = f"node rank {', '.join(absent)}" if len(absent) == wanted else f"{wanted} of {settings.nnodes} agents"
        hosts = ", ".join(hello.host for hello in self._agents.values()) or "nobody"
        return (
            f"waited {settings.timeout:g} s for {settings.nnodes} agents (--nnodes); missing: {who}; present: {hosts}. "
            "Start the missing ones with the same --rdzv-endpoint and --rdzv-id"
        )

    def _end(self, outcome: JobOutcome) -> list[Command]:
        self._phase, self._deadline, self.outcome = JobPhase.FINISHED, None, outcome
        return self._tell_all(outcome, self._agents)

    @staticmethod
    def _tell_all(order: Order, agents: Iterable[int]) -> list[Command]:
        return [SendOrder(agent, order) for agent in sorted(agents)]
