"""The processes of one job on one host: started, signalled, waited for, with a pipe to each that outlives worlds."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from asyncpar.core.concurrency.streams import close_stream
from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.core.observe.agent_line import Loss
from asyncpar.core.observe.waits import CONDITION_WORDS
from asyncpar.errors import ProtocolError
from asyncpar.hosts.director import STOPPED_PATIENCE
from asyncpar.hosts.pipe_messages import MOST_BYTES, decode_rank_line, encode_line
from asyncpar.launch.agents.host_protocol import (
    ConditionChanged,
    RankGone,
    RankResumed,
    RankSilent,
    RankWrote,
    SlotEvent,
    StartRank,
    StateChanged,
    WaitChanged,
    WriteToRank,
)
from asyncpar.launch.agents.job_record import ElasticMode, SubmittedJob
from asyncpar.launch.display import Display
from asyncpar.launch.failure import RankEnd
from asyncpar.launch.host_watch import HostWatch
from asyncpar.launch.job import JobCertificates
from asyncpar.launch.options import Streams
from asyncpar.launch.post_mortem import PostMortem
from asyncpar.launch.rank_output import RankLogs
from asyncpar.launch.rank_process import command_line, elastic_environment, find_room, rank_environment
from asyncpar.launch.rank_run import RankPlan, RankRun, RankTools
from asyncpar.launch.reaper_client import ReaperClient
from asyncpar.launch.vitals import Condition, RankState
from asyncpar.launch.wait_board import WaitReport

_LAST_WORDS = 0.2
"""Seconds for which the pipe of a process that has ended is still read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlace:
    """The facts about a host that its ranks need; ``environment`` is inherited.  A witness has no ranks.

    ``slots`` is the number of ranks here of jobs that start again with every world, ``log_directory`` where logs of
    ranks are (None: what the job says), ``node_rank`` the place that this host asks for (None: any).  A launcher that
    acts as the agent of its host ``is_launcher``: it reports as launchers do.  ``rendezvous`` is the address of the
    rendezvous as this host knows it ("": as the group does), ``master`` its ``MASTER_ADDR`` where it is the first host.
    """

    host: str
    host_id: str
    bind: str
    secret_file: str
    environment: Mapping[str, str]
    certificates: JobCertificates | None = None
    is_witness: bool = False
    slots: int | None = None
    log_directory: str | None = None
    node_rank: int | None = None
    is_launcher: bool = False
    is_embedded: bool = False
    """Whether the program in whose process the launcher acts shows the end of the job."""
    rendezvous: str = ""
    master: str = ""
    post_mortem: str | None = None
    """The directory for the remains of jobs that fail; None: nothing is kept."""


@dataclass
class _Running:
    rank: RankRun
    member: str
    is_ending: bool = False
    is_clear: asyncio.Event = field(default_factory=asyncio.Event)
    writer: asyncio.StreamWriter | None = None
    reading: asyncio.Task[None] | None = None
    silent: asyncio.TimerHandle | None = None
    condition: Condition = Condition.WELL


class SlotProcesses:
    """Starts the processes that a machine asks for, and reports their events to ``feed``."""

    def __init__(
        self,
        record: SubmittedJob,
        place: HostPlace,
        *,
        display: Display,
        reaper: ReaperClient,
        feed: Callable[[SlotEvent], None],
        watch: HostWatch | None = None,
        remains: PostMortem | None = None,
        on_output: Callable[[int, Streams, bytes], None] = lambda _slot, _stream, _chunk: None,
        on_broken_output: Callable[[str], None] = lambda _cause: None,
    ) -> None:
        """``on_output`` gets the output of each slot's process, ``b""`` at the end of a stream.

        ``on_broken_output`` gets the reason for which output cannot be shown ("": its reader has closed it).
        """
        self._record = record
        self._place = place
        self._feed = feed
        self._on_output = on_output
        self._running: dict[int, _Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._starts = 0
        self._active = 0
        """The number of processes that run, or whose output is being passed on."""
        logs = place.log_directory or record.log_directory
        directory = None if logs is None else Path(logs)
        self._tools = RankTools(
            reaper=reaper,
            display=display,
            logs=RankLogs(directory, redirects=record.redirects, tee=record.tee),
            watch=watch or HostWatch(place.host),
            grace=record.grace,
            on_rank_end=self._ended,
            on_state=lambda _: None,
            on_report=self._report_waits,
            on_broken_output=on_broken_output,
            holds_tracebacks=record.mode is ElasticMode.RESTART,  # the end of the job has them
            full_traceback=record.full_traceback,
            post_mortem=remains,
        )

    @property
    def pids(self) -> dict[int, int]:
        """The process ids of the running processes, by slot."""
        return {
            slot: one.rank.pid for slot, one in self._running.items() if not one.is_ending and one.rank.pid is not None
        }

    def start(self, order: StartRank) -> None:
        """Start a process, once nothing of its predecessor in the slot is left."""
        self._run(self._start(order))

    def signal(self, slot: int, number: int) -> None:
        """Send a signal to the process group of ``slot``, if one runs."""
        running = self._running.get(slot)
        if running is not None:
            running.rank.signal(number)

    def kill(self, slot: int) -> None:
        """Kill the process group of ``slot``, if one runs, and pass on no more of its output."""
        running = self._running.get(slot)
        if running is not None:
            running.rank.kill()

    def notify_loss(self, loss: Loss) -> None:
        """Notify all ranks of this host, except the lost one, of a loss."""
        for running in self._running.values():
            running.rank.notify_loss(loss)

    def notify_condition(self, rank: int, how: str) -> None:
        """Notify all ranks of this host, except ``rank``, of the condition of that one."""
        for running in self._running.values():
            running.rank.notify_condition(rank, how)

    def write(self, order: WriteToRank) -> None:
        """Write to the pipe of a member, if its process runs."""
        for running in self._running.values():
            if running.member == order.member and running.writer is not None and not running.writer.is_closing():
                running.writer.write(encode_line(order.message))

    async def close(self) -> None:
        """End all running processes, and return when nothing of them is left."""
        for slot in self._running:
            self.kill(slot)
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def settle(self) -> None:
        """Return when all output of ended processes has been passed on."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self, order: StartRank) -> None:
        before = self._running.get(order.slot)
        if before is not None:
            await before.is_clear.wait()
        await find_room()
        here, there = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=here, limit=MOST_BYTES)
        tools = replace(
            self._tools,
            on_state=partial(self._changed, order.slot),
            on_output=lambda _, stream, chunk: self._on_output(order.slot, stream, chunk),
        )
        run = RankRun(self._plan(order, there.detach()), tools)
        running = self._running[order.slot] = _Running(run, order.member, writer=writer)
        running.reading = asyncio.ensure_future(self._read(running, reader))
        self._active += 1
        try:
            await run.run()
        finally:
            self._active -= 1
            running.reading.cancel()
            running.is_clear.set()
            await close_stream(writer)
        if not self._active:
            await self._tools.display.finish()

    def _plan(self, order: StartRank, pipe: int) -> RankPlan:
        record, own = self._record, self._place
        is_elastic = record.mode is ElasticMode.RANKS
        processes = record.slots + record.spares if is_elastic else own.slots or record.slots
        place = LaunchEnvironment(
            rank=order.slot,
            local_rank=order.slot,
            world_size=processes,
            local_world_size=processes,
            group_rank=0,
            group_world_size=1,
            master_addr=own.bind,
            master_port=1,
            rendezvous="-",
            secret_file=own.secret_file,
            job=record.name,
            generation=self._starts,
            restart_count=0,
            host=own.host,
            host_id=own.host_id,
            bind=own.bind,
            timeout=record.timeout,
            certs=None if own.certificates is None else str(own.certificates.directory),
            transport=record.transport,
        )
        self._starts += 1
        if order.place is not None:
            world = order.place
            place = replace(
                place,
                rank=world.rank,
                world_size=world.world_size,
                group_rank=world.group_rank,
                group_world_size=world.group_world_size,
                master_addr=world.master_addr,
                master_port=world.master_port,
                rendezvous=own.rendezvous or world.rendezvous,
                generation=world.generation,
                restart_count=world.restarts,
                certified=world.certified,
                rendezvous_role=world.rendezvous_role,
            )
        base = {**own.environment, **record.environment}
        if not is_elastic:
            os.close(pipe)
        return RankPlan(
            command=command_line(record.kind, record.program, record.arguments),
            environment=elastic_environment(base, place) if is_elastic else rank_environment(base, place),
            place=place,
            director=pipe if is_elastic else None,
            directory=record.directory or None,
        )

    async def _read(self, running: _Running, reader: asyncio.StreamReader) -> None:
        """Read a process's messages from its pipe; kill it after an undecodable one, which counts as a crash."""
        try:
            with suppress(ConnectionError):
                while line := await reader.readline():
                    self._feed(RankWrote(running.member, decode_rank_line(line)))
        except (ProtocolError, ValueError) as error:  # ValueError: a line is too long
            running.rank.kill()
            await self._tools.display.lines(f"asyncpar agent: {running.member} is killed: its pipe: {error}\n".encode())

    # -- events of processes -------------------------------------------------------------------------------------------

    def _ended(self, end: RankEnd) -> None:
        if self._tools.post_mortem is not None:
            self._tools.post_mortem.add_end(end)
        running = self._running.get(end.local_rank)
        if running is not None and not running.is_ending:
            running.is_ending = True
            self._run(self._report_end(running, end))

    async def _report_end(self, running: _Running, end: RankEnd) -> None:
        if running.reading is not None:
            await asyncio.wait({running.reading}, timeout=_LAST_WORDS)
        if running.silent is not None:
            running.silent.cancel()
        self._feed(RankGone(end.local_rank, end))

    def _report_waits(self, report: WaitReport) -> None:
        if self._record.mode is ElasticMode.RESTART:  # the ranks of others change their numbers with each world
            self._feed(WaitChanged(report))

    def _changed(self, slot: int, state: RankState) -> None:
        """Handle a process that is stopped or hung, or has recovered."""
        running = self._running.get(slot)
        if running is not None and self._record.mode is ElasticMode.RESTART:
            self._feed(StateChanged(slot, state))
            return
        if running is None or running.condition is state.condition:
            return
        running.condition = state.condition
        if running.silent is not None:
            running.silent.cancel()
            running.silent = None
        how, limits = CONDITION_WORDS[state.condition], self._record.silence
        at = f"; it is at {state.place}" if state.place else ""
        if state.condition is Condition.WELL:
            self._feed(RankResumed(slot))
            self._feed(ConditionChanged(slot, "runs again"))
            return
        limit = limits.of(state.condition)
        if state.condition is Condition.STOPPED:
            limit = STOPPED_PATIENCE if limit is None else min(STOPPED_PATIENCE, limit)
            self._feed(ConditionChanged(slot, f"{how}{at}"))
        else:
            self._feed(ConditionChanged(slot, f"{how}; {limits.explain(state.condition, 'it')}{at}"))
        if limit is not None:
            loop = asyncio.get_running_loop()
            running.silent = loop.call_later(limit, self._feed, RankSilent(slot, how))
