"""`asyncpar launch` where agents run jobs: submit the job and follow it.  Without agents, act as one for this job."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from asyncpar.core.addresses import (
    check_bindable,
    is_loopback,
    is_ours,
    join_address,
    loopback,
    resolve,
    spell_host,
    split_address,
)
from asyncpar.core.concurrency.tasks import new_loop
from asyncpar.core.observe.reporting import open_closed_streams
from asyncpar.core.signals import TERMINATING
from asyncpar.errors import LaunchError, UsageError
from asyncpar.launch.agents.agent_options import AgentOptions, parse_address
from asyncpar.launch.agents.agent_process import AgentProcess
from asyncpar.launch.agents.any_agent import AnyAgent
from asyncpar.launch.agents.control_client import ControlClient, NoAgent
from asyncpar.launch.agents.group_credentials import GroupCredentials, find_credentials
from asyncpar.launch.agents.group_watch import GroupNow, GroupWatch, ask_with, group_of_view
from asyncpar.launch.agents.job_record import ElasticMode, SubmittedJob, record_of
from asyncpar.launch.agents.requests import AGENTS_PORT, CancelRequest, SubmitRequest
from asyncpar.launch.agents.views import GroupView
from asyncpar.launch.command_line import print_line
from asyncpar.launch.display import Display, OutputStream, make_display
from asyncpar.launch.host_placement import make_log_directory
from asyncpar.launch.job import read_host_certificates
from asyncpar.launch.job_view import JobOutcome
from asyncpar.launch.observers import observe_job
from asyncpar.launch.options import LaunchOptions, ObserverOptions, ProgramKind
from asyncpar.launch.rank_process import rank_command
from asyncpar.net.arena.limits import count_cores
from asyncpar.net.checked_settings import check_settings
from asyncpar.net.membership.host import host_name
from asyncpar.net.transport.rpc import Credentials
from asyncpar.observe.summary import JobSummary

_PROBE_SECONDS = 5.0
"""Seconds that an agent which accepts a connection may take to answer; a port where nothing listens fails at once."""
_PROBE_EVERY = 0.1
_QUIET_SECONDS = 3.0
"""Seconds for which a launcher waits for the first one before it reports that."""
_AGAIN_SECONDS = 30.0
_POLL_SECONDS = 0.2
_SUBMIT_SECONDS = 15.0
"""Seconds that an agent may take until its group has a job."""
_TICKET_BYTES = 8
_OUTPUT_PATIENCE = 0.2
_WINDOW_SECONDS = 3600.0
_SETTINGS_PREFIX = "ASYNCPAR_"
_NOT_SETTINGS = ("ASYNCPAR_SECRET_FILE", "ASYNCPAR_CERTS")


def run_submission(options: LaunchOptions, environment: Mapping[str, str]) -> int:
    """Run the job on agents, or act as one, and return its exit code.

    Raises ``UsageError`` before anything starts when the options do not fit this machine or the agents.
    """
    where = parse_address("--rdzv-endpoint", options.endpoint or loopback())
    is_later = (options.node_rank or 0) > 0
    options, credentials = adopt_credentials(options, where)
    client = ControlClient(where, credentials.rpc, seconds=_PROBE_SECONDS)
    try:
        view = asyncio.run(find_group(client, patience=options.timeout if is_later else 0.0))
    except NoAgent as error:
        if is_later:
            trouble = str(error).partition("; start one")[0]
            raise NoAgent(
                f"--rdzv-endpoint: nobody answered at {where} for {options.timeout:g} s (--rdzv-timeout); is the "
                f"launcher of the first host (--node-rank 0) running there? The last trouble was: {trouble}"
            ) from None
        if options.elastic == ElasticMode.RESTART:
            options.check_endpoint()
        view = None
    is_submitted = view is not None and not view.is_for_one_job
    for name, given in (("--post-mortem", options.post_mortem), ("--metrics", options.observers.metrics)):
        if is_submitted and given is not None:
            raise UsageError(f"{name}: agents run this job; give it to each `asyncpar agent`")
    record = make_record(options, environment)
    open_closed_streams()
    stdout, stderr = OutputStream(1, name="stdout"), OutputStream(2, name="stderr")
    display = make_display(stdout, stderr)
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            if view is not None and not view.is_for_one_job:
                submission = _Submission(record, where, credentials.rpc, display, view)
                return runner.run(submission.run(options.observers))
            acting = _be_an_agent(options, record, where, credentials, display, environment, founds=view is None)
            return runner.run(acting)
    finally:
        stdout.close(patience=_OUTPUT_PATIENCE)
        stderr.close(patience=_OUTPUT_PATIENCE)


def adopt_credentials(options: LaunchOptions, where: str) -> tuple[LaunchOptions, GroupCredentials]:
    """Return the credentials that the options name, and the options with the job that the certificates are for.

    Raises ``UsageError``, also if there are fewer certificates than ranks on this host.
    """
    if options.certs is None:
        return options, find_credentials(options.secret_file, None, where)
    home = read_host_certificates(options.certs, node_rank=options.node_rank).directory
    credentials = find_credentials(options.secret_file, str(home), where)
    assert credentials.certificates is not None
    job = credentials.certificates.agent.identity.job
    if options.job not in (None, job):
        raise UsageError(f"--rdzv-id: expected {job!r}, the job of the certificates in {home}, got {options.job!r}")
    credentials.certificates.check_slots((options.nproc or count_cores()) + options.spares)
    return replace(options, job=job), credentials


async def find_group(client: ControlClient, *, patience: float) -> GroupView:
    """Return the view of the agent there; it may take ``patience`` seconds to appear, if the launchers have places.

    Raises ``NoAgent``.
    """
    now = asyncio.get_running_loop().time
    began = announced = now()
    while True:
        try:
            return await client.status()
        except NoAgent:
            if now() >= began + patience:
                raise
            if now() >= announced + (_AGAIN_SECONDS if announced > began else _QUIET_SECONDS):
                announced = now()
                print_line(
                    f"asyncpar launch: nobody answers at {client.address} yet; waiting up to {patience:g} s for the "
                    "launcher of the first host (--node-rank 0)",
                    err=True,
                )
            await asyncio.sleep(_PROBE_EVERY)


def make_record(options: LaunchOptions, environment: Mapping[str, str]) -> SubmittedJob:
    """Return the job's record for agents.  Raises ``UsageError`` if there is no such program here."""
    rank_command(options.kind, options.program, options.arguments)
    check_settings(environment)
    program = str(Path(options.program).absolute()) if options.kind is ProgramKind.SCRIPT else options.program
    logs = make_log_directory(options)
    window = _WINDOW_SECONDS if options.elastic == ElasticMode.RANKS else math.inf
    settings = {
        name: value
        for name, value in environment.items()
        if name.startswith(_SETTINGS_PREFIX) and name not in _NOT_SETTINGS
    }
    return record_of(
        options,
        name=options.job or Path(options.program).name,
        program=program,
        directory=os.getcwd(),
        environment=settings,
        slots=options.nproc or count_cores(),
        restart_window=options.restart_window or window,
        log_directory=None if logs is None else str(logs),
    )


class _Submission:
    """A job that agents run, as followed by its launcher."""

    def __init__(
        self, record: SubmittedJob, address: str, credentials: Credentials, display: Display, view: GroupView
    ) -> None:
        self._record = record
        self._view = view
        self._agents = AnyAgent([address, *(host.address for host in view.hosts)], credentials)
        self._credentials = credentials
        self._display = display
        self._last_change = ""
        self._signals: list[int] = []
        self._message = ""
        self._printing: set[asyncio.Task[None]] = set()

    async def run(self, observers: ObserverOptions) -> int:
        """Submit the job, show it, and return its exit code."""
        base = JobSummary(job=self._record.name, pid=os.getpid(), time=time.time(), started=time.time())
        watch = GroupWatch(base, self._know, ask_with(self._credentials))
        watch.changed(command=(self._record.program, *self._record.arguments))
        logs = self._record.log_directory
        directory = None if logs is None else Path(logs)
        async with observe_job(observers, watch, own=tuple, directory=directory, report=self._print_later) as shown:
            try:
                exit_code = await self._run()
                await shown.finish(JobOutcome(exit_code, self._message))
            finally:
                if self._printing:
                    await asyncio.wait(self._printing)
            return exit_code

    async def _know(self) -> GroupNow:
        return group_of_view(self._view)

    async def _run(self) -> int:
        record = msgspec.structs.replace(self._record, ticket=secrets.token_hex(_TICKET_BYTES))
        request = SubmitRequest(record=record)
        submitted = await self._agents.ask(lambda client: client.submit(request), seconds=_SUBMIT_SECONDS)
        await self._print(f"job {submitted.number} runs on the agents of {self._agents.address}")
        loop = asyncio.get_running_loop()
        for number in TERMINATING:
            loop.add_signal_handler(number, self._signals.append, number)
        try:
            return await self._follow(submitted.number)
        finally:
            for number in TERMINATING:
                loop.remove_signal_handler(number)

    async def _follow(self, number: int) -> int:
        cancelled = 0
        while True:
            if len(self._signals) > cancelled:
                cancelled = len(self._signals)
                if cancelled > 1:
                    return 128 + self._signals[0]
                await self._cancel(number, self._signals[0])
            view = self._view = await self._agents.status()
            job = view.job
            if job is None or job.number != number:
                raise LaunchError(f"job {number}: the agents know nothing of it any more")
            if view.change and view.change != self._last_change:
                self._last_change = view.change
                hosts = "1 host" if view.world_hosts == 1 else f"{view.world_hosts} hosts"
                await self._print(f"{view.change}; {view.world_size} members, on {hosts}")
            if job.state == "over":
                self._message = job.message
                if job.message:
                    await self._print(job.message)
                return job.exit_code or 0
            await asyncio.sleep(_POLL_SECONDS)

    async def _cancel(self, number: int, signal_number: int) -> None:
        name = signal.Signals(signal_number).name
        await self._print(f"got {name}; ranks have {self._record.grace:g} s to end (again: leave them to it)")
        request = CancelRequest(number=number, exit_code=128 + signal_number, why=f"its launcher got {name}")
        await self._agents.ask(lambda client: client.cancel(request))

    def _print_later(self, text: str) -> None:
        task = asyncio.ensure_future(self._print(text))
        self._printing.add(task)
        task.add_done_callback(self._printing.discard)

    async def _print(self, text: str) -> None:
        lines = "".join(f"asyncpar launch: {line}\n" for line in text.splitlines())
        await self._display.lines(lines.encode(errors="replace"))


async def _be_an_agent(
    options: LaunchOptions,
    record: SubmittedJob,
    where: str,
    credentials: GroupCredentials,
    display: Display,
    environment: Mapping[str, str],
    *,
    founds: bool,
) -> int:
    """Act as the agent of this host for this job alone, in a group with the other launchers."""
    host, _ = split_address(where)
    is_here = is_ours(resolve(host))
    if founds and not is_here:
        raise NoAgent(
            f"--rdzv-endpoint: no agent answers at {where}, which is another host; start the launcher there first, or "
            "name a host that is in the job"
        )
    agent = AgentOptions(
        join=() if founds else (where,),
        listen=_own_address(options, where, founds=founds),
        node_rank=0 if founds else options.node_rank,
        name=options.host_name or _own_name(options, is_guest=is_here and not founds),
        grace=options.grace,
        post_mortem=options.post_mortem,
        observers=options.observers if founds else options.observers.of_host,
    )
    process = AgentProcess(agent, credentials, display, environment, job=record)
    try:
        end = await process.run()
    except UsageError as error:
        if not founds or options.node_rank is not None or _is_free(where):
            raise
        try:  # another launcher on this host was faster
            await find_group(ControlClient(where, credentials.rpc, seconds=_PROBE_SECONDS), patience=_PROBE_SECONDS)
        except NoAgent:
            raise error from None
        return await _be_an_agent(options, record, where, credentials, display, environment, founds=False)
    if end is None:
        return process.exit_code
    return end.exit_code or process.exit_code


def _own_address(options: LaunchOptions, where: str, *, founds: bool) -> str | None:
    """Return where this launcher serves the others; None: at the address that its way to them shows."""
    if founds:
        return where if options.endpoint is not None else join_address(split_address(where)[0], 0)
    if options.local_addr is None:
        return None
    address = spell_host(options.local_addr)
    return join_address(address, 0 if is_loopback(resolve(options.local_addr)) else AGENTS_PORT)


def _own_name(options: LaunchOptions, *, is_guest: bool) -> str | None:
    """Return the name of one of several launchers on the host of the first one; None: the host's name."""
    return f"{host_name()}-{os.getpid() if options.node_rank is None else options.node_rank}" if is_guest else None


def _is_free(address: str) -> bool:
    """Return whether a server can be bound to ``address``."""
    try:
        check_bindable(*split_address(address))
    except UsageError:
        return False
    return True
