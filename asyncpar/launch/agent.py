"""The agent of one host: it carries out its machine's commands.  The first host's agent also serves the coordinator."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncpar import __version__
from asyncpar._proto.asyncpar.v1 import membership_pb2 as pb
from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.core.signals import TERMINATING
from asyncpar.errors import LaunchError
from asyncpar.launch.agent_machine import (
    AgentMachine,
    AgentTick,
    Command,
    CoordinatorLost,
    Event,
    Exit,
    KillRank,
    KillWorkers,
    OutputBroken,
    PrintText,
    ReportInterrupted,
    ReportStopped,
    Signalled,
    SignalWorkers,
    StartWorkers,
    WorkersGone,
)
from asyncpar.launch.coordinator_client import CoordinatorClient
from asyncpar.launch.coordinator_service import CoordinatorServer
from asyncpar.launch.display import Display
from asyncpar.launch.failure import RankEnd
from asyncpar.launch.host_watch import HostWatch
from asyncpar.launch.job import JobSecret, LaunchJob, obtain_secret
from asyncpar.launch.job_service import serve_job
from asyncpar.launch.job_view import HostOnly, describe_job
from asyncpar.launch.messages import encode_rank_end, encode_state, encode_wait_report
from asyncpar.launch.observers import observe_job
from asyncpar.launch.options import Streams
from asyncpar.launch.post_mortem import PostMortem
from asyncpar.launch.protocol import AgentAssignment, AgentHello, JobOutcome, NotifyOfCondition, NotifyRanks
from asyncpar.launch.rank_output import RankLogs
from asyncpar.launch.rank_process import rank_environment
from asyncpar.launch.reaper_client import ReaperClient
from asyncpar.launch.vitals import Condition, RankState, describe_state
from asyncpar.launch.worker_group import RankPlan, WorkerGroup, WorkerGroupTools
from asyncpar.net.transport.rpc import Credentials
from asyncpar.observe.summary import pack

_FAREWELL_PATIENCE = 3.0


class AgentEmbedding:
    """Ties an agent to the program on whose event loop it runs; the signals of that program are not the agent's.

    ``on_address`` gets the ``host:port`` of the coordinator once it is known.  ``on_end`` is called after the last rank
    has ended; where the coordinator was served here, it gets the failed ranks of all hosts, the one that explains the
    others first.  After that ``paths`` are removed, as they are when the program dies.
    """

    def __init__(
        self,
        *,
        on_address: Callable[[str], None],
        on_end: Callable[[tuple[RankEnd, ...]], None],
        paths: tuple[Path, ...],
    ) -> None:
        self.on_address = on_address
        self.on_end = on_end
        self.paths = paths
        self._take: Callable[[int], None] | None = None
        self._early: list[int] = []

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Handle ``number`` as a launcher handles that signal: the first ends the job, the second kills it."""
        if self._take is None:
            self._early.append(number)
        else:
            self._take(number)

    def attach(self, take: Callable[[int], None] | None) -> None:
        """Let ``take`` handle all signals so far and from now on; None: the agent has ended."""
        self._take = take
        while take is not None and self._early:
            take(self._early.pop(0))


async def run_agent(job: LaunchJob, display: Display, embedding: AgentEmbedding | None = None) -> JobOutcome:
    """Run this host's part of the job to its end.  None of the processes that it started remains when it returns.

    Without ``embedding``, it handles the signals of this process.
    Raises ``UsageError`` when the coordinator's port cannot be bound.
    """
    with ExitStack() as stack:
        reaper = ReaperClient()
        stack.callback(reaper.close)
        if embedding is not None:
            for path in embedding.paths:
                reaper.add_path(path)
        secret = obtain_secret(job.options, job.placement, reaper, stack)
        post_mortem = _open_post_mortem(job)
        if post_mortem is not None:
            reaper.explain(post_mortem.folder)
            stack.callback(reaper.forget_folder)
        outcome = JobOutcome(0)
        try:
            async with CoordinatorServer(job, secret) as server:
                watch = HostWatch(job.placement.host)
                agent = _Agent(
                    job, display, reaper, secret, server.address, watch, is_first=server.is_here, remains=post_mortem
                )
                if embedding is not None:
                    stack.callback(embedding.attach, None)
                    embedding.on_address(server.address)
                is_here, shown = server.is_here, job.options.observers
                view = server.view if is_here else HostOnly(describe_job(job), watch)
                async with (
                    serve_job(job, view, reaper, report=agent.report, is_whole=is_here, on_signals=embedding is None),
                    observe_job(
                        shown if is_here else shown.of_host,
                        view,
                        own=lambda: watch.summary().ranks,
                        directory=job.log_directory if is_here else None,
                        report=agent.report,
                        reports_alarms=is_here,
                    ) as observers,
                ):
                    agent.observe_output(observers.add_output)
                    outcome = await agent.run(embedding)
                    await observers.finish(outcome)
                    if embedding is not None:
                        embedding.on_end(server.failures)
        finally:  # even if nothing has begun
            if post_mortem is not None:
                outcome = _finish_post_mortem(post_mortem, outcome)
        return outcome


def _open_post_mortem(job: LaunchJob) -> PostMortem | None:
    if job.options.post_mortem is None:
        return None
    return PostMortem.open(
        job.options.post_mortem,
        job=job.placement.job,
        host=job.placement.host,
        command=job.command,
        environment=job.environment,
    )


def _finish_post_mortem(post_mortem: PostMortem, outcome: JobOutcome) -> JobOutcome:
    """Write the summary after a failure, and print its location."""
    post_mortem.finish(has_failed=outcome.exit_code != 0, message=outcome.message)
    where = post_mortem.describe()
    return replace(outcome, message=f"{outcome.message}\n{where}".strip()) if where else outcome


class _Agent:
    """The agent of one job.  Its tasks belong to the task group in ``run``."""

    def __init__(
        self,
        job: LaunchJob,
        display: Display,
        reaper: ReaperClient,
        secret: JobSecret,
        coordinator: str,
        watch: HostWatch,
        *,
        is_first: bool,
        remains: PostMortem | None,
    ) -> None:
        options = job.options
        self._remains = remains
        self._job = job
        self._display = display
        self._secret = secret
        self._coordinator = coordinator
        self._is_first = is_first
        self._machine = AgentMachine(grace=options.grace)
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[JobOutcome] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._workers: WorkerGroup | None = None
        self._groups: list[asyncio.Task[None]] = []
        self._background: set[asyncio.Task[None]] = set()
        self._conditions: dict[int, Condition] = {}
        """The condition that was last printed, by rank."""
        self._tasks = asyncio.TaskGroup()
        self._unreported: list[str] | None = []
        self._reaper = reaper
        self._watch = watch
        self._tools = WorkerGroupTools(
            reaper=reaper,
            display=display,
            logs=RankLogs(job.log_directory, redirects=options.redirects, tee=options.tee),
            watch=watch,
            grace=options.grace,
            on_rank_end=self._report_rank_end,
            on_state=self._report_state,
            on_report=lambda report: self._client.send(encode_wait_report(report)),
            on_broken_output=lambda cause: self._feed(OutputBroken(cause)),
            holds_tracebacks=True,
            full_traceback=options.full_traceback,
            post_mortem=remains,
        )
        credentials = Credentials(secret.secret, None if job.certificates is None else job.certificates.agent)
        self._client = CoordinatorClient(
            coordinator, credentials, timeout=options.timeout, take=self._feed, reconnect=options.reconnect
        )
        self._client.on_collect = self._collect
        watch.on_summary = lambda summary: self._send_unnumbered(observed=pb.HostObserved(summary=pack(summary)))

    async def run(self, embedding: AgentEmbedding | None = None) -> JobOutcome:
        """Connect to the coordinator, execute commands, and return the outcome."""
        options, placement = self._job.options, self._job.placement
        node_rank = 0 if self._is_first else options.node_rank
        hello = AgentHello(
            job=placement.job,
            nnodes=options.nnodes,
            nproc=placement.nproc,
            node_rank=node_rank,
            host=placement.host,
            version=__version__,
        )
        numbers = TERMINATING if embedding is None else ()
        before = signal.getsignal(signal.SIGINT)
        for number in numbers:
            self._loop.add_signal_handler(number, self._feed, Signalled(number))
        try:
            async with self._tasks as tasks:
                if embedding is not None:
                    embedding.attach(lambda number: self._feed(Signalled(number)))
                unreported, self._unreported = self._unreported or [], None
                for text in unreported:
                    self.report(text)
                attending = tasks.create_task(self._client.run(hello))
                own = [
                    attending,
                    *map(tasks.create_task, (self._display.run(), self._watch_reaper(), self._watch.run())),
                ]
                outcome = await self._outcome
                if self._client.has_finished:  # it acknowledges the outcome
                    await asyncio.wait({attending}, timeout=_FAREWELL_PATIENCE / 3)
                if self._background:  # the coordinator may be gone by now
                    await asyncio.wait(self._background, timeout=_FAREWELL_PATIENCE / 3)
                for task in (*own, *self._background, *self._groups):
                    task.cancel()
                return outcome
        finally:
            await self._watch.close()
            if self._timer is not None:
                self._timer.cancel()
            for number in numbers:
                self._loop.remove_signal_handler(number)
            if numbers and before is not None:  # None: installed by C code
                signal.signal(signal.SIGINT, before)

    def _feed(self, event: Event) -> None:
        for command in self._machine.handle(event, now=self._loop.time()):
            self._obey(command)
        if self._timer is not None:
            self._timer.cancel()
        deadline = self._machine.next_deadline
        self._timer = None if deadline is None else self._loop.call_at(deadline, self._feed, AgentTick())

    def _obey(self, command: Command) -> None:
        match command:
            case StartWorkers(assignment):
                self._conditions.clear()
                self._workers = WorkerGroup(self._plans(assignment), self._tools)
                workers = self._run_workers(self._workers, assignment.generation)
                self._groups.append(self._tasks.create_task(workers))
            case SignalWorkers(number) if self._workers is not None:
                self._workers.signal(number)
            case KillWorkers() if self._workers is not None:
                self._workers.kill()
            case KillRank(rank) if self._workers is not None:
                self._workers.kill_rank(rank)
            case NotifyRanks(loss) if self._workers is not None:
                self._workers.notify_loss(loss)
            case NotifyOfCondition(rank, how) if self._workers is not None:
                self._workers.notify_condition(rank, how)
            case ReportStopped(generation):
                self._client.send(pb.AgentEvent(stopped=pb.AgentStopped(generation=generation)))
            case ReportInterrupted(number):
                self._client.send(pb.AgentEvent(interrupted=pb.AgentInterrupted(signal_number=number)))
            case PrintText(text):
                printing = self._tasks.create_task(self._print(text))
                self._background.add(printing)
                printing.add_done_callback(self._background.discard)
            case Exit(outcome) if not self._outcome.done():
                self._outcome.set_result(outcome)

    async def _run_workers(self, workers: WorkerGroup, generation: int) -> None:
        await workers.run()
        self._workers = None
        self._feed(WorkersGone(generation))

    def report(self, text: str) -> None:
        """Print a line of the launcher's own; before the agent runs, it is kept until it does."""
        if self._unreported is None:
            self._obey(PrintText(text))
        else:
            self._unreported.append(text)

    def observe_output(self, take: Callable[[int, Streams, bytes], None]) -> None:
        """Pass all further output of ranks to ``take``."""
        self._tools = replace(self._tools, on_output=take)

    def _send_unnumbered(self, **event: Any) -> None:
        self._client.send_unnumbered(pb.AgentEvent(**event))

    def _collect(self, asked: pb.Collect) -> None:
        task = self._tasks.create_task(self._answer(asked))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _answer(self, asked: pb.Collect) -> None:
        for answer in await self._watch.collect(asked.kind, asked.ranks or None):
            self._send_unnumbered(collected=pb.HostCollected(request=asked.request, answer=pack(answer)))
        self._send_unnumbered(collected=pb.HostCollected(request=asked.request, is_last=True))

    async def _print(self, text: str) -> None:
        try:
            await self._display.lines(f"asyncpar launch: {text}\n".encode(errors="replace"))
        except OSError:
            self._feed(OutputBroken(""))

    async def _watch_reaper(self) -> None:
        try:
            await self._reaper.watch(lambda: self._obey(PrintText("the reaper was killed; there is another one now")))
        except LaunchError as error:
            self._feed(CoordinatorLost(str(error)))

    def _report_rank_end(self, end: RankEnd) -> None:
        if self._remains is not None:
            self._remains.add_end(end)
        self._client.send(encode_rank_end(end))

    def _report_state(self, state: RankState) -> None:
        """Report the state of a rank to the coordinator, and print it if its condition has changed."""
        self._client.send(encode_state(state))
        if state.condition is not self._conditions.get(state.rank, Condition.WELL):
            self._obey(PrintText(describe_state(state, self._job.silence)))
        self._conditions[state.rank] = state.condition

    def _plans(self, assignment: AgentAssignment) -> list[RankPlan]:
        return [self._plan(assignment, local_rank) for local_rank in range(self._job.placement.nproc)]

    def _plan(self, assignment: AgentAssignment, local_rank: int) -> RankPlan:
        options, placement = self._job.options, self._job.placement
        place = LaunchEnvironment(
            rank=assignment.rank_offset + local_rank,
            local_rank=local_rank,
            world_size=assignment.world_size,
            local_world_size=placement.nproc,
            group_rank=assignment.group_rank,
            group_world_size=assignment.group_world_size,
            master_addr=assignment.master_addr,
            master_port=assignment.master_port,
            rendezvous=self._coordinator,
            secret_file=str(self._secret.path),
            job=placement.job,
            generation=assignment.generation,
            restart_count=assignment.restart_count,
            host=placement.host,
            host_id=placement.host_id,
            bind=placement.bind,
            timeout=options.timeout,
            certs=None if self._job.certificates is None else str(self._job.certificates.directory),
            transport=options.transport,
        )
        return RankPlan(
            command=self._job.command, environment=rank_environment(self._job.environment, place), place=place
        )
