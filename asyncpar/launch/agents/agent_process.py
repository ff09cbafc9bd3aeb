"""The process of an agent: its server, its part in the group, its ranks, and the signals that ask it to end."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, closing, contextmanager
from pathlib import Path

from asyncpar.core.addresses import (
    check_reaches_itself,
    is_loopback,
    join_address,
    loopback,
    resolve,
    route_to,
    split_address,
)
from asyncpar.core.concurrency.tasks import new_loop
from asyncpar.core.observe.reporting import open_closed_streams
from asyncpar.core.system_errors import os_reason
from asyncpar.errors import UsageError
from asyncpar.hosts.messages import WorldGroup, WorldStatus
from asyncpar.hosts.service import WorldService
from asyncpar.launch.agents.agent_options import AgentOptions
from asyncpar.launch.agents.control_service import ControlService
from asyncpar.launch.agents.ending import EndRequests
from asyncpar.launch.agents.group_credentials import GroupCredentials, find_credentials
from asyncpar.launch.agents.group_part import GROUP_JOB, take_part
from asyncpar.launch.agents.group_watch import GroupNow, GroupWatch, ask_with, group_of_status
from asyncpar.launch.agents.host_agent import HostAgent
from asyncpar.launch.agents.job_record import (
    OF_ONE_LAUNCHER,
    OPTIONS,
    ElasticMode,
    JobEnd,
    SubmittedJob,
    decode_record,
)
from asyncpar.launch.agents.requests import AGENTS_PORT, SubmitRequest
from asyncpar.launch.agents.slot_processes import HostPlace
from asyncpar.launch.display import Display, OutputStream, make_display
from asyncpar.launch.host_placement import usable_directory
from asyncpar.launch.job_directory import JobEntry
from asyncpar.launch.job_service import serve_watch
from asyncpar.launch.job_view import JobOutcome
from asyncpar.launch.observers import Observers, observe_job
from asyncpar.launch.reaper_client import ReaperClient, require_process_groups
from asyncpar.net.membership.host import host_id, host_name
from asyncpar.observe.summary import JobSummary

_OUTPUT_PATIENCE = 0.2
_AGAIN_SECONDS = 1.0
"""Seconds until an agent that was declared lost joins again."""


def run_agent_process(options: AgentOptions, environment: Mapping[str, str]) -> int:
    """Run the agent until it is asked to end, and return its exit code.  Ranks inherit ``environment``.

    Raises ``UsageError``, ``AuthenticationError`` and ``LaunchError`` when it cannot join the group.
    """
    open_closed_streams()
    require_process_groups()
    credentials = find_credentials(options.secret_file, options.certs, listen_at(options))
    stdout, stderr = OutputStream(1, name="stdout"), OutputStream(2, name="stderr")
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            process = AgentProcess(options, credentials, make_display(stdout, stderr), environment)
            runner.run(process.run())
    finally:
        stdout.close(patience=_OUTPUT_PATIENCE)
        stderr.close(patience=_OUTPUT_PATIENCE)
    return 0


class AgentProcess:
    """An agent from start to end.  With ``job``, it opens that job if none is open, and ends with it."""

    def __init__(
        self,
        options: AgentOptions,
        credentials: GroupCredentials,
        display: Display,
        environment: Mapping[str, str],
        *,
        job: SubmittedJob | None = None,
    ) -> None:
        self._options = options
        self._listen = listen_at(options)
        check_reaches_itself(split_address(self._listen)[0])
        self._credentials = credentials
        self._display = display
        self._environment = environment
        self._job = job
        self._agent: HostAgent | None = None
        self._name = options.name or host_name()
        self._is_for_job = job is not None
        self._group: WorldService | None = None
        base = JobSummary(job=self._job_name, pid=os.getpid(), time=time.time(), started=time.time())
        self._view = GroupWatch(base, self._know, ask_with(credentials.rpc), self._name)
        self._unreported: list[str] = []
        self.ending = EndRequests(self._name, job, grace=options.grace)
        self._failed_late = 0
        """The exit code of ranks that failed after the job was complete."""

    @property
    def exit_code(self) -> int:
        """The exit code of the signal that has ended it, or of ranks that failed after the job was complete."""
        return self.ending.exit_code or self._failed_late

    async def run(self) -> JobEnd | None:
        """Take part in the group until asked to end; join again after having been declared lost."""
        join = self._options.join
        with self.ending.signals(), closing(ReaperClient()) as reaper:
            if self._options.post_mortem is not None:
                usable_directory("--post-mortem", self._options.post_mortem)
            with _state_directory(self._options, reaper) as directory:
                async with self._show() as observers:
                    while True:
                        end, others = await self._live(join, reaper, directory, observers)
                        if others is not None and not self.ending.has_begun:
                            join = others
                            await asyncio.sleep(_AGAIN_SECONDS)
                        if others is None or self.ending.has_begun:  # who is asked to end does not come again
                            if end is not None:
                                await observers.finish(JobOutcome(end.exit_code or self.exit_code, end.message))
                            return end

    @property
    def _job_name(self) -> str:
        return GROUP_JOB if self._job is None else self._job.name

    async def _live(
        self, join: tuple[str, ...], reaper: ReaperClient, directory: Path, observers: Observers
    ) -> tuple[JobEnd | None, tuple[str, ...] | None]:
        """Take part once.  Return the end of the job and, if the others went on without this host, their addresses."""
        async with AsyncExitStack() as stack:
            group, agent = await self._take_part(stack, join, reaper, directory)
            entry = self._entry(agent.address)
            self._view.own = agent.watch
            agent.on_output = observers.add_output
            agent.on_world = self._view.began
            for text in self._unreported:
                agent.report(text)
            self._unreported.clear()
            async with serve_watch(entry, self._environment, self._view, reaper, report=agent.report):
                end = await agent.run()
            self._failed_late = agent.failure[0]
            if not group.is_dismissed:
                return end, None
            others = [host.address for host in (await group.status()).hosts if host.name != self._name]
            return end, tuple(others) or join

    async def _know(self) -> GroupNow:
        return GroupNow() if self._group is None else group_of_status(await self._group.status())

    def _show(self) -> AbstractAsyncContextManager[Observers]:
        """Show the ranks of all hosts; of several launchers that run one job, only the one that opened it does."""
        logs = None if self._job is None or self._options.join else self._job.log_directory
        return observe_job(
            self._options.observers,
            self._view,
            own=lambda: () if self._view.own is None else self._view.own.summary().ranks,
            directory=None if logs is None else Path(logs),
            report=self._report,
            reports_alarms=self._job is not None and not self._options.join,
        )

    def _report(self, text: str) -> None:
        if self._agent is None:
            self._unreported.append(text)
        else:
            self._agent.report(text)

    async def _take_part(
        self, stack: AsyncExitStack, join: tuple[str, ...], reaper: ReaperClient, directory: Path
    ) -> tuple[WorldService, HostAgent]:
        """Serve this host's part of the group until ``stack`` closes.  Opens the job, if this agent has one."""
        part = await take_part(
            stack,
            self._place(split_address(self._listen)[0]),
            listen=self._listen,
            join=join,
            credentials=self._credentials.rpc,
            votes=directory,
            display=self._display,
            reaper=reaper,
            only_job=self._job is not None,
            is_for_one_job=self._is_for_job,
        )
        self._agent, self._group = part.agent, part.group
        self.ending.attach(part.group, part.agent)
        if self._job is not None:
            await self._open(part.group, part.control, self._job)
        return part.group, part.agent

    def _place(self, bind: str) -> HostPlace:
        return HostPlace(
            host=self._name,
            host_id=host_id(self._name),
            bind=bind,
            secret_file=str(self._credentials.secret.path),
            certificates=self._credentials.certificates,
            environment=self._environment,
            is_witness=self._options.witness,
            node_rank=self._options.node_rank,
            slots=None if self._job is None else self._job.slots,
            is_launcher=self._job is not None and self._job.mode is ElasticMode.RESTART,
            log_directory=None if self._job is None else self._job.log_directory,
            post_mortem=self._options.post_mortem,
        )

    def _entry(self, address: str) -> JobEntry:
        """Return the entry by which commands find this agent and its ranks."""
        job = self._job
        return JobEntry(
            job=self._job_name,
            pid=os.getpid(),
            host=self._name,
            started=time.time(),
            command=() if job is None else (job.program, *job.arguments),
            agent=address,
        )

    async def _open(self, group: WorldGroup, control: ControlService, job: SubmittedJob) -> None:
        """Open the job, unless another launcher was faster; then both jobs must be equal."""
        status = await group.status()
        if status.job is None:
            try:
                await control.submit(SubmitRequest(record=job))
            except UsageError:
                status = await group.status()
                if status.job is None:
                    raise
        compare_job(await group.status(), job)


def compare_job(status: WorldStatus, job: SubmittedJob) -> None:
    """Raise ``UsageError`` that names the differences if the group runs another job than ``job``."""
    if status.job is None:
        return
    running = decode_record(status.job.record)
    own = set(OF_ONE_LAUNCHER)
    if job.mode is ElasticMode.RESTART:
        own.add("slots")  # hosts may have different numbers of ranks
    for name in SubmittedJob.__struct_fields__:
        ours, theirs = getattr(job, name), getattr(running, name)
        if name not in own and ours != theirs:
            raise UsageError(f"{OPTIONS[name]}: expected {theirs!r}, as the job that runs has it, got {ours!r}")


def listen_at(options: AgentOptions) -> str:
    """Return the numeric address to serve at: the one at which others reach this host."""
    if options.listen is not None:
        host, port = split_address(options.listen)
        return join_address(_resolve("--listen", host), port)
    if not options.join:
        return join_address(loopback(), AGENTS_PORT)
    host, port = split_address(options.join[0])
    address = _resolve("--join", host)
    if is_loopback(address):
        return join_address(address, 0)
    try:
        return join_address(route_to(address, port), AGENTS_PORT)
    except OSError as error:
        raise UsageError(f"--join: there is no way to {host} ({os_reason(error)}); name --listen") from error


def _resolve(option: str, name: str) -> str:
    try:
        return resolve(name)
    except OSError as error:
        raise UsageError(f"{option}: the host name {name!r} cannot be resolved ({os_reason(error)})") from error


@contextmanager
def _state_directory(options: AgentOptions, reaper: ReaperClient) -> Iterator[Path]:
    """Yield the directory for votes, created if necessary and locked against other agents: a voter is one process."""
    if options.state_dir is None:
        directory = Path(tempfile.mkdtemp(prefix="asyncpar-votes-"))
        reaper.add_path(directory)
    else:
        directory = usable_directory("--state-dir", options.state_dir)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(directory, descriptor)
        yield directory
    finally:
        os.close(descriptor)


def _lock(directory: Path, descriptor: int) -> None:
    import fcntl  # missing on some systems on which this module is imported

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(
            f"--state-dir: {directory} is in use by another agent; give each agent a directory of its own"
        ) from error
