"""The agent of one host: obeys its machine.  The first host's agent also serves the coordinator and the rendezvous."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import ExitStack

from asyncpar._proto.asyncpar.v1 import membership_pb2 as pb
from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.errors import LaunchError
from asyncpar.launch.agent_events import (
    Command,
    CoordinatorLost,
    CrewGone,
    Event,
    Exit,
    KillCrew,
    KillRank,
    OutputBroken,
    Say,
    SignalCrew,
    Signalled,
    StartCrew,
    TellInterrupted,
    TellRanks,
    TellStopped,
    Tick,
)
from asyncpar.launch.agent_machine import AgentMachine
from asyncpar.launch.attendance import Attendance
from asyncpar.launch.coordinator_server import CoordinatorServer
from asyncpar.launch.crew import Crew, CrewTools, RankEnd, RankPlan
from asyncpar.launch.display import Display
from asyncpar.launch.guard import Guard
from asyncpar.launch.job import Job
from asyncpar.launch.job_secret import JobSecret, obtain_secret
from asyncpar.launch.messages import encode_rank_end, encode_state
from asyncpar.launch.plan import Assignment, Hello, Outcome
from asyncpar.launch.rank_environment import rank_environment
from asyncpar.launch.rank_logs import RankLogs
from asyncpar.launch.vitals import Condition, RankState
from asyncpar.net.transport.rpc import Credentials

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FAREWELL_PATIENCE = 3.0


async def run_agent(job: Job, display: Display) -> Outcome:
    """Run this host's part of the job to its end.  No process that it started is left when it returns.

    Raises ``UsageError`` when the coordinator's port cannot be bound.
    """
    with ExitStack() as stack:
        guard = Guard()
        stack.callback(guard.close)
        secret = obtain_secret(job.options, job.site, guard, stack)
        async with CoordinatorServer(job, secret) as server:
            agent = _Agent(job, display, guard, secret, server.address, is_first=server.is_here)
            return await agent.run()


class _Agent:
    """One run.  Tasks belong to the task group in ``run``."""

    def __init__(
        self, job: Job, display: Display, guard: Guard, secret: JobSecret, coordinator: str, *, is_first: bool
    ) -> None:
        options = job.options
        self._job = job
        self._display = display
        self._secret = secret
        self._coordinator = coordinator
        self._is_first = is_first
        self._machine = AgentMachine(grace=options.grace)
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[Outcome] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._crew: Crew | None = None
        self._crews: list[asyncio.Task[None]] = []
        self._talking: set[asyncio.Task[None]] = set()
        self._conditions: dict[int, Condition] = {}
        """By rank: what people were told of it last."""
        self._tasks = asyncio.TaskGroup()
        self._guard = guard
        self._tools = CrewTools(
            guard=guard,
            display=display,
            logs=RankLogs(job.log_directory, redirects=options.redirects, tee=options.tee),
            grace=options.grace,
            on_rank_end=self._tell_rank_end,
            on_state=self._tell_state,
            on_broken_output=lambda cause: self._feed(OutputBroken(cause)),
        )
        credentials = Credentials(secret.secret, None if job.certificates is None else job.certificates.agent)
        self._attendance = Attendance(
            coordinator, credentials, timeout=options.timeout, take=self._feed, reconnect=options.reconnect
        )

    async def run(self) -> Outcome:
        """Attend, obey, and return the outcome."""
        options, site = self._job.options, self._job.site
        node_rank = 0 if self._is_first else options.node_rank
        hello = Hello(job=site.job, nnodes=options.nnodes, nproc=site.nproc, node_rank=node_rank, host=site.host)
        before = signal.getsignal(signal.SIGINT)
        for number in _SIGNALS:
            self._loop.add_signal_handler(number, self._feed, Signalled(number))
        try:
            async with self._tasks as tasks:
                attending = tasks.create_task(self._attendance.run(hello))
                own = [attending, *map(tasks.create_task, (self._display.run(), self._watch_reaper()))]
                outcome = await self._outcome
                if self._attendance.has_finished:  # it lets the coordinator know
                    await asyncio.wait({attending}, timeout=_FAREWELL_PATIENCE / 3)
                if self._talking:  # unless nobody listens
                    await asyncio.wait(self._talking, timeout=_FAREWELL_PATIENCE / 3)
                for task in (*own, *self._talking, *self._crews):
                    task.cancel()
                return outcome
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for number in _SIGNALS:
                self._loop.remove_signal_handler(number)
            if before is not None:  # one of C
                signal.signal(signal.SIGINT, before)

    def _feed(self, event: Event) -> None:
        for command in self._machine.handle(event, now=self._loop.time()):
            self._obey(command)
        if self._timer is not None:
            self._timer.cancel()
        deadline = self._machine.next_deadline
        self._timer = None if deadline is None else self._loop.call_at(deadline, self._feed, Tick())

    def _obey(self, command: Command) -> None:
        match command:
            case StartCrew(assignment):
                self._conditions.clear()
                self._crew = Crew(self._plans(assignment), self._tools)
                crew = self._run_crew(self._crew, assignment.generation)
                self._crews.append(self._tasks.create_task(crew))
            case SignalCrew(number) if self._crew is not None:
                self._crew.signal(number)
            case KillCrew() if self._crew is not None:
                self._crew.kill()
            case KillRank(rank) if self._crew is not None:
                self._crew.kill_rank(rank)
            case TellRanks(loss) if self._crew is not None:
                self._crew.tell_loss(loss)
            case TellStopped(generation):
                self._attendance.tell(pb.AgentEvent(stopped=pb.AgentStopped(generation=generation)))
            case TellInterrupted(number):
                self._attendance.tell(pb.AgentEvent(interrupted=pb.AgentInterrupted(signal_number=number)))
            case Say(text):
                talking = self._tasks.create_task(self._say(text))
                self._talking.add(talking)
                talking.add_done_callback(self._talking.discard)
            case Exit(outcome) if not self._outcome.done():
                self._outcome.set_result(outcome)

    async def _run_crew(self, crew: Crew, generation: int) -> None:
        await crew.run()
        self._crew = None
        self._feed(CrewGone(generation))

    async def _say(self, text: str) -> None:
        try:
            await self._display.lines(f"asyncpar launch: {text}\n".encode(errors="replace"))
        except OSError:
            self._feed(OutputBroken(""))

    async def _watch_reaper(self) -> None:
        try:
            await self._guard.watch(lambda: self._obey(Say("the reaper was killed; there is another one now")))
        except LaunchError as error:
            self._feed(CoordinatorLost(str(error)))

    def _tell_rank_end(self, end: RankEnd) -> None:
        self._attendance.tell(encode_rank_end(end, now=time.time()))

    def _tell_state(self, state: RankState) -> None:
        """Tell the coordinator how a rank is, and people if it does not run."""
        self._attendance.tell(encode_state(state))
        if state.condition is not self._conditions.get(state.rank, Condition.WELL):
            self._obey(Say(_describe(state, self._job.options.silent_after)))
        self._conditions[state.rank] = state.condition

    def _plans(self, assignment: Assignment) -> list[RankPlan]:
        return [self._plan(assignment, local_rank) for local_rank in range(self._job.site.nproc)]

    def _plan(self, assignment: Assignment, local_rank: int) -> RankPlan:
        options, site = self._job.options, self._job.site
        place = LaunchEnvironment(
            rank=assignment.rank_offset + local_rank,
            local_rank=local_rank,
            world_size=assignment.world_size,
            local_world_size=site.nproc,
            group_rank=assignment.group_rank,
            group_world_size=assignment.group_world_size,
            master_addr=assignment.master_addr,
            master_port=assignment.master_port,
            rendezvous=self._coordinator,
            secret_file=str(self._secret.path),
            job=site.job,
            generation=assignment.generation,
            restart_count=assignment.restart_count,
            host=site.host,
            host_id=site.host_id,
            bind=site.bind,
            timeout=options.timeout,
            certs=None if self._job.certificates is None else str(self._job.certificates.directory),
            transport=options.transport,
        )
        return RankPlan(
            command=self._job.command, environment=rank_environment(self._job.environment, place), place=place
        )


def _describe(state: RankState, limit: float | None) -> str:
    """Return what people are told of a rank whose condition has changed."""
    if state.condition is Condition.WELL:
        return f"rank {state.rank} runs again"
    what = "is stopped" if state.condition is Condition.STOPPED else "runs no Python code: something holds its GIL"
    then = "" if limit is None else f"; after {limit:g} s of it (--silent-after) the job ends"
    return f"rank {state.rank} {what}{then}"
