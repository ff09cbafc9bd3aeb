"""The agent of one host: it takes part in the group, and runs the ranks of one job after another.

A machine per job decides about the ranks; this module carries out its commands.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncpar.core.addresses import free_port
from asyncpar.errors import LaunchError, ProtocolError, UsageError
from asyncpar.hosts.messages import (
    HostCommand,
    HostDismissed,
    HostParked,
    JobClosed,
    JobOpened,
    JobWaits,
    WorldGroup,
)
from asyncpar.hosts.pipe_messages import LeaseGranted
from asyncpar.launch.agents.host_protocol import (
    AbandonRank,
    AnnounceExit,
    GrantLease,
    HostTick,
    InterruptRanks,
    LeaveHost,
    NotifyLeader,
    NotifyOfCondition,
    NotifyRanks,
    OpenRendezvous,
    PrintLine,
    RankGone,
    RanksOver,
    ShowWorld,
    SignalRank,
    SlotCommand,
    SlotEvent,
    StartRank,
    WriteToRank,
)
from asyncpar.launch.agents.job_record import ElasticMode, JobEnd, SubmittedJob, decode_end, decode_record
from asyncpar.launch.agents.restarted_ranks import RestartedRanks
from asyncpar.launch.agents.restarted_world import HostRanks
from asyncpar.launch.agents.slot_processes import HostPlace, SlotProcesses
from asyncpar.launch.agents.views import RankView
from asyncpar.launch.display import Display
from asyncpar.launch.failure import RankEnd
from asyncpar.launch.host_watch import HostWatch
from asyncpar.launch.options import Streams
from asyncpar.launch.post_mortem import PostMortem
from asyncpar.launch.reaper_client import ReaperClient
from asyncpar.net.membership.service import RendezvousService

if TYPE_CHECKING:
    from asyncpar.launch.agents.elastic_ranks import ElasticRanks

_INCARNATION_BYTES = 4
_LAST_WORDS = 1.0
"""Seconds that the last lines may take to be written: a reader may have stopped reading."""


@dataclass
class _HostJob:
    """One job on this host."""

    number: int
    record: SubmittedJob
    machine: ElasticRanks | RestartedRanks
    processes: SlotProcesses
    end: JobEnd | None = None
    is_over: bool = False
    failure: str = ""
    """The failure of ranks after the job was complete."""
    exit_code: int = 0
    remains: PostMortem | None = None


class HostAgent:
    """Carries out the group's decisions on this host: ``run`` until ``leave``, or for ``only_job`` until it is over."""

    def __init__(
        self,
        group: WorldGroup,
        place: HostPlace,
        *,
        rendezvous: RendezvousService,
        display: Display,
        reaper: ReaperClient,
        only_job: bool = False,
        on_line: Callable[[str], None] | None = None,
        processes: Callable[..., SlotProcesses] = SlotProcesses,
    ) -> None:
        """``on_line`` takes the agent's own lines (None: they are displayed); ``processes`` makes those of a job."""
        self._group = group
        self._place = place
        self.address = ""
        """The address where the agent serves (``host:port``)."""
        self._rendezvous = rendezvous
        self._display = display
        self._reaper = reaper
        self._only_job = only_job
        self._on_line = on_line
        self._make_processes = processes
        self.watch = HostWatch(place.host)
        """The reports of the ranks on this host."""
        self.on_output: Callable[[int, Streams, bytes], None] = lambda _rank, _stream, _chunk: None
        """Called with the output of ranks; ``b""`` marks the end of a stream."""
        self.on_broken_output: Callable[[str], None] = lambda _cause: None
        """Called when output cannot be shown, with the reason ("": its reader has closed it)."""
        self.on_world: Callable[[ShowWorld], None] = lambda _world: None
        """Called when ranks that start again with every world begin."""
        self._has_interrupted = False
        self._loop = asyncio.get_running_loop()
        self._job: _HostJob | None = None
        self._waiting: list[JobOpened | JobClosed] = []
        self._parked = HostParked("")
        self._timer: asyncio.TimerHandle | None = None
        self._working: set[asyncio.Task[None]] = set()
        self._left: asyncio.Future[JobEnd | None] = self._loop.create_future()
        self._why_leaving: str | None = None

    async def run(self) -> JobEnd | None:
        """Return the end of the job, None if the host left before.  Nothing that was started here is left then.

        Raises ``LaunchError`` when this host has lost the group.
        """
        receiving = asyncio.create_task(self._receive(), name="asyncpar receive from the group")
        watching = asyncio.create_task(self._watch_reaper(), name="asyncpar watch the reaper")
        showing = asyncio.create_task(self._display.run(), name="asyncpar show progress")
        inspecting = asyncio.create_task(self.watch.run(), name="asyncpar inspect the ranks")
        try:
            ends: set[asyncio.Future[Any]] = {receiving, watching, self._left}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in (receiving, watching):
                if task.done():
                    task.result()
            if not self._left.done():
                raise LaunchError("the group of agents is gone")
            return self._left.result()
        finally:
            for task in (receiving, watching, showing, inspecting):
                task.cancel()
            await asyncio.wait({receiving, watching, showing, inspecting})
            if self._timer is not None:
                self._timer.cancel()
            if self._job is not None:
                self._job.is_over = True  # the end of a process is not a crash any more
                await self._job.processes.close()
                self._explain(self._job, self._job.end)
            await self.watch.close()
            if self._working:
                _, unread = await asyncio.wait(self._working, timeout=_LAST_WORDS)
                for task in unread:
                    task.cancel()

    def leave(self, why: str, *, grace: float) -> None:
        """Let the ranks of this host leave at the end of a step, within ``grace`` seconds; ``run`` then returns.

        A second call ends them now.
        """
        self._why_leaving = why
        job = self._job
        if job is None or job.is_over:
            self._finish(None)
            return
        self._feed(LeaveHost(grace, why))

    def interrupt(self, number: int) -> None:
        """Send the signal ``number``, which ends the job, to the ranks of this host; the group is to end the job."""
        self._has_interrupted = True
        self._feed(InterruptRanks(number))

    def kill(self) -> None:
        """Kill the ranks of this host."""
        if self._job is not None and not self._job.is_over:
            for slot in self._job.machine.ranks:
                self._job.processes.kill(slot)

    @property
    def is_leaving(self) -> bool:
        return self._why_leaving is not None

    @property
    def record(self) -> SubmittedJob | None:
        """The last job."""
        return None if self._job is None else self._job.record

    @property
    def number(self) -> int | None:
        """The number of the last job."""
        return None if self._job is None else self._job.number

    @property
    def is_idle(self) -> bool:
        """Whether no rank runs here or waits to."""
        return self._job is None or self._job.is_over

    @property
    def failure(self) -> tuple[int, str]:
        """Exit code and message of ranks that failed here after the job was complete; 0 and "" if none did."""
        return (0, "") if self._job is None else (self._job.exit_code, self._job.failure)

    @property
    def crashes(self) -> tuple[RankEnd, ...]:
        """The ranks that failed in the last job: here, of one of ``--elastic ranks``, in chronological order.

        Of one whose ranks start again with every world, those of all hosts; the one that explains the others is first.
        """
        return () if self._job is None else self._job.machine.failures

    def ranks(self) -> tuple[RankView, ...]:
        """Return the ranks on this host."""
        job = self._job
        if job is None or job.is_over:
            return ()
        pids, places, spares = job.processes.pids, job.machine.ranks, job.machine.spares
        refusals = job.machine.refusals
        return tuple(
            RankView(
                slot=slot,
                rank=places.get(slot),
                pid=pids.get(slot),
                restarts=restarts,
                is_spare=slot in spares,
                refusal=refusals.get(slot, ""),
            )
            for slot, restarts in job.machine.restarts.items()
        )

    # -- the group -----------------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        async for command in self._group.commands:
            self._take(command)

    def _take(self, command: HostCommand) -> None:
        match command:
            case JobOpened() | JobClosed():
                self._waiting.append(command)
                self._next_job()
                return
            case HostDismissed(why):
                self.report(
                    f"the others have gone on without this host, since {why}; its ranks end, and it comes again"
                )
                self._finish(None)
                return
            case JobWaits(number, text):
                if self._job is not None and self._job.number == number and not self._job.is_over:
                    self.report(text)
                return
            case HostParked(why):
                self._parked = command
                self.report(f"no quorum: {why}; ranks keep what they have" if why else "a quorum is reached again")
        self._feed(command)

    def _next_job(self) -> None:
        """Handle the waiting orders of the group, as far as the current job allows."""
        while self._waiting:
            command, job = self._waiting[0], self._job
            if isinstance(command, JobOpened):
                if job is not None and not job.is_over:
                    return
                self._waiting.pop(0)
                self._open(command)
            else:
                self._waiting.pop(0)
                if job is not None and job.number == command.number and job.end is None:
                    job.end = decode_end(command.record)
                    if not self._place.is_launcher:  # which reports the end when no rank of its own is left
                        self._report_end(job.end)
                    self._feed(command)

    def _open(self, opened: JobOpened) -> None:
        if self.is_leaving or self._place.is_witness:
            return
        try:
            record = decode_record(opened.record)
            if self._place.certificates is not None:
                self._place.certificates.check_slots(self._slots(record) + record.spares)
        except (ProtocolError, UsageError) as error:
            self.report(str(error))
            return
        self.watch.begin_job()
        process = "launcher" if self._only_job else "agent"
        remains = _open_remains(self._place, opened.number, record, self._reaper, self.report, process=process)
        processes = self._make_processes(
            record,
            self._place,
            display=self._display,
            reaper=self._reaper,
            feed=self._feed_job(opened.number),
            watch=self.watch,
            remains=remains,
            on_output=self._pass_output,
            on_broken_output=self._pass_broken,
        )
        machine = self._machine(opened.number, record)
        self._job = _HostJob(opened.number, record, machine, processes, remains=remains)
        if not self._place.is_launcher:
            ranks = f"{self._slots(record)} ranks here"
            self.report(f"job {opened.number}: {record.name} (--elastic {record.mode}, {ranks})")
        self._carry_out(machine.begin(self._loop.time()))
        self._feed(self._parked)

    def _pass_output(self, slot: int, stream: Streams, chunk: bytes) -> None:
        ranks = {} if self._job is None else self._job.machine.ranks
        self.on_output(ranks.get(slot, slot), stream, chunk)

    def _pass_broken(self, cause: str) -> None:
        self.on_broken_output(cause)

    def _explain(self, job: _HostJob, end: JobEnd | None) -> None:
        """Write the post-mortem of a job whose processes are gone, if the job or one of its ranks here has failed."""
        remains, job.remains = job.remains, None
        if remains is not None:
            _explain_remains(remains, job.exit_code, job.failure, end, self._reaper, self.report)

    def _machine(self, number: int, record: SubmittedJob) -> ElasticRanks | RestartedRanks:
        certificates = self._place.certificates
        certified = None if certificates is None else certificates.ranks
        if record.mode is ElasticMode.RANKS:
            from asyncpar.launch.agents.elastic_ranks import ElasticRanks  # most launches have no use for it

            return ElasticRanks(number, record, host=self._place.host, draw=_draw, certified=certified)
        bind = self._place.bind
        own = HostRanks(
            slots=self._slots(record),
            rendezvous=self.address,
            certified=None if certified is None or record.is_fixed else certified[: self._slots(record)],
            role=None if certificates is None or record.is_fixed else certificates.agent.identity.role.label,
            place=self._place.node_rank,
            master=self._place.master,
        )
        return RestartedRanks(
            number,
            record,
            host=self._place.host,
            own=own,
            free_port=lambda: free_port(self._place.master or bind),
            draw=_draw,
            parked_within=record.reconnect if self._only_job else None,
            is_launcher=self._place.is_launcher,
            missing=lambda: self._rendezvous.missing,
        )

    def _slots(self, record: SubmittedJob) -> int:
        """Return the number of ranks of a job on this host."""
        return record.slots if record.mode is ElasticMode.RANKS else self._place.slots or record.slots

    def _feed_job(self, number: int) -> Callable[[SlotEvent], None]:
        def feed(event: SlotEvent) -> None:
            if self._job is not None and self._job.number == number:
                self._feed(event)

        return feed

    def _feed(self, event: SlotEvent) -> None:
        job = self._job
        if job is None or job.is_over:
            return
        if isinstance(event, RankGone):
            self._note_end(job, event)
        self._carry_out(job.machine.handle(event, now=self._loop.time()))

    def _note_end(self, job: _HostJob, gone: RankGone) -> None:
        if job.end is not None and job.end.is_complete and gone.end.returncode != 0:
            job.exit_code = job.exit_code or gone.end.exit_code
            text = f"rank {self._place.host}/{gone.slot} {gone.end.ending} after the job was complete"
            job.failure = job.failure or text
            self.report(text)

    def _carry_out(self, commands: list[SlotCommand]) -> None:
        for command in commands:
            self._obey(command)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        job = self._job
        deadline = None if job is None or job.is_over else job.machine.next_deadline
        if deadline is not None:
            self._timer = self._loop.call_at(deadline, self._feed, HostTick())

    def _obey(self, command: SlotCommand) -> None:
        job = self._job
        assert job is not None, "only a job has commands"
        match command:
            case StartRank() | SignalRank() | AbandonRank() | WriteToRank():
                self._obey_about_rank(job.processes, command)
            case GrantLease(member):
                job.processes.write(WriteToRank(member, LeaseGranted(self._group.lease)))
            case OpenRendezvous(generation, world_size, certified):
                name = job.record.name
                self._rendezvous.open(generation=generation, world_size=world_size, job=name, certified=certified)
            case AnnounceExit(generation, rank, how):
                self._rendezvous.exited(generation=generation, rank=rank, how=how)
            case NotifyRanks(loss):
                job.processes.notify_loss(loss)
            case NotifyOfCondition(rank, how):
                job.processes.notify_condition(rank, how)
            case NotifyLeader(event):
                self._group.report(event)
            case ShowWorld():
                self.on_world(command)
            case PrintLine(text):
                self.report(text)
            case RanksOver(end):
                self._start(self._settle(job, end))

    @staticmethod
    def _obey_about_rank(processes: SlotProcesses, command: StartRank | SignalRank | AbandonRank | WriteToRank) -> None:
        match command:
            case StartRank():
                processes.start(command)
            case SignalRank(slot, number):
                processes.signal(slot, number)
            case AbandonRank(slot):
                processes.kill(slot)
            case WriteToRank():
                processes.write(command)

    async def _settle(self, job: _HostJob, end: JobEnd | None) -> None:
        is_asked_to_end = self.is_leaving or (end is not None and not end.is_complete)
        try:
            async with asyncio.timeout(max(job.record.grace, _LAST_WORDS) if is_asked_to_end else None):
                await job.processes.settle()
        except TimeoutError:  # their output is not read
            await job.processes.close()
        if self._place.is_launcher and not self._place.is_embedded and end is not None and end.message:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS):
                    await self._print(self.words(end))
        self._explain(job, end or job.end)
        job.is_over = True
        if self.is_leaving or self._only_job:
            self._finish(end)
            return
        self._next_job()

    def _finish(self, end: JobEnd | None) -> None:
        if not self._left.done():
            self._left.set_result(end)

    # -- output --------------------------------------------------------------------------------------------------------

    def _report_end(self, end: JobEnd) -> None:
        how = "is complete" if end.is_complete else f"ends with exit code {end.exit_code}"
        self.report(f"the job {how}" + (f": {end.message}" if end.message else ""))

    def words(self, end: JobEnd) -> str:
        """Return the message of ``end`` as the launcher that was interrupted has it, or any other one."""
        is_own = self._has_interrupted and end.interrupted
        return f"ended by {signal.Signals(end.exit_code - 128).name}" if is_own else end.message

    def report(self, text: str) -> None:
        """Print a line of the agent's own."""
        if self._on_line is not None:
            self._on_line(text)
            return
        self._start(self._print(text))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    async def _print(self, text: str) -> None:
        if self._place.is_launcher:
            lines = f"asyncpar launch: {text}\n"
        else:
            lines = "".join(f"asyncpar agent {self._place.host}: {line}\n" for line in text.splitlines())
        try:
            await self._display.lines(lines.encode(errors="replace"))
        except OSError:  # the reader is gone
            self.on_broken_output("")

    async def _watch_reaper(self) -> None:
        await self._reaper.watch(lambda: self.report("the reaper was killed; there is another one now"))


def _draw() -> str:
    return secrets.token_hex(_INCARNATION_BYTES)


def _open_remains(
    place: HostPlace,
    number: int,
    record: SubmittedJob,
    reaper: ReaperClient,
    report: Callable[[str], None],
    *,
    process: str = "agent",
) -> PostMortem | None:
    """Return the folder for the remains of job ``number``; None if none is wanted, or it cannot be created now.

    ``process`` is the kind of process that runs the ranks: this host's agent, or a launcher that is one for its job.
    """
    if place.post_mortem is None:
        return None
    try:
        remains = PostMortem.open(
            place.post_mortem,
            job=record.name if place.is_launcher else f"{record.name}.{number}",
            host=place.host,
            command=(record.program, *record.arguments),
            environment={**place.environment, **record.environment},
            process=process,
        )
    except UsageError as error:
        report(f"job {number} runs without a post-mortem: {error}")
        return None
    reaper.explain(remains.folder)
    return remains


def _explain_remains(
    remains: PostMortem,
    exit_code: int,
    failure: str,
    end: JobEnd | None,
    reaper: ReaperClient,
    report: Callable[[str], None],
) -> None:
    """Write the summary if the job, or a rank of it here (``exit_code``, ``failure``), has failed."""
    has_failed = exit_code != 0 or (end is not None and end.exit_code != 0)
    remains.finish(has_failed=has_failed, message=failure or ("" if end is None else end.message))
    reaper.forget_folder()
    if text := remains.describe():
        report(text)
