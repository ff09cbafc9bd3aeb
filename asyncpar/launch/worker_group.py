"""The ranks of one generation on one host: start them, relay their output, report how each ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from typing import Any

from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.core.observe.agent_line import Loss, encode_loss
from asyncpar.errors import LaunchError
from asyncpar.launch.display import Display
from asyncpar.launch.failure import FailureReport, RankEnd
from asyncpar.launch.options import Streams
from asyncpar.launch.rank_output import RankLogs, RankOutput
from asyncpar.launch.rank_process import ChildStreams, RankProcess
from asyncpar.launch.reaper_client import ReaperClient
from asyncpar.launch.vitals import LOOK_SECONDS, RankState

_CANNOT_START = 126


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """The command and environment of one rank; ``place`` is the part of the environment that the launcher sets."""

    command: tuple[str, ...]
    environment: dict[str, str]
    place: LaunchEnvironment


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGroupTools:
    """Shared by the worker groups of all generations.

    ``on_broken_output`` gets the reason ("": the reader closed its end), ``on_state`` each state that has changed.
    """

    reaper: ReaperClient
    display: Display
    logs: RankLogs
    grace: float
    on_rank_end: Callable[[RankEnd], None]
    on_state: Callable[[RankState], None]
    on_broken_output: Callable[[str], None]


class WorkerGroup:
    """The processes of one generation; runs once.  ``signal`` and ``kill`` may be called at any time, also before."""

    def __init__(self, plans: Sequence[RankPlan], tools: WorkerGroupTools) -> None:
        self._plans = plans
        self._tools = tools
        self._processes: dict[int, RankProcess] = {}
        self._outputs: dict[int, RankOutput] = {}
        self._notices: dict[int, int] = {}
        """By local rank: the pipe that notifies it of lost ranks."""
        self._watches: list[asyncio.Task[None]] = []
        self._killed: set[int] = set()
        self._pending_signal: int | None = None

    async def run(self) -> None:
        """Run all ranks; return when every process group is gone and all output has been passed on."""
        async with asyncio.TaskGroup() as tasks:
            for plan in self._plans:
                self._start(plan, tasks)
            for process in self._processes.values():
                process.go()
            watching = tasks.create_task(self._look_after())
            if self._pending_signal is not None:
                self.signal(self._pending_signal)
            if self._watches:
                await asyncio.wait(self._watches)
            watching.cancel()
        await self._tools.display.finish()

    def signal(self, number: int) -> None:
        """Send ``number`` to the process group of every rank."""
        self._pending_signal = number
        for process in self._processes.values():
            process.signal(number)

    def kill(self) -> None:
        """Kill every process group, and stop waiting for readers of our output."""
        self.signal(signal.SIGKILL)
        for output in self._outputs.values():
            output.abandon()

    def kill_rank(self, rank: int) -> None:
        """Kill the process group of ``rank``, if it runs here."""
        for plan in self._plans:
            if plan.place.rank == rank and plan.place.local_rank in self._processes:
                self._killed.add(plan.place.local_rank)
                self._processes[plan.place.local_rank].signal(signal.SIGKILL)

    def tell_loss(self, loss: Loss) -> None:
        """Notify every rank, except the lost one, of a loss."""
        line = encode_loss(loss)
        for plan in self._plans:
            descriptor = self._notices.get(plan.place.local_rank)
            if descriptor is not None and plan.place.rank != loss.rank:
                with suppress(BlockingIOError, BrokenPipeError):  # it does not listen, or is gone
                    os.write(descriptor, line)

    def _start(self, plan: RankPlan, tasks: asyncio.TaskGroup) -> None:
        try:
            process, output = self._spawn(plan)
        except (OSError, LaunchError) as error:
            reason = f"the process could not be started: {error}"
            report = FailureReport(type_name=type(error).__name__, message=reason, traceback="")
            self._tools.on_rank_end(
                RankEnd(**_who(plan.place), pid=0, returncode=_CANNOT_START, at=time.time(), report=report)
            )
            return
        self._processes[plan.place.local_rank] = process
        self._outputs[plan.place.local_rank] = output
        self._watches.append(tasks.create_task(self._watch(plan, process, output, tasks)))

    def _spawn(self, plan: RankPlan) -> tuple[RankProcess, RankOutput]:
        """Start the trampoline with its pipes.  On an error nothing stays open."""
        files = self._open_logs(plan)
        read_ends, write_ends = zip(*(os.pipe() for _ in range(3)), strict=True)
        notices, notify = os.pipe()
        os.set_blocking(notify, False)
        streams = ChildStreams(
            stdin=_standard_input(plan.place.rank),
            stdout=write_ends[0],
            stderr=write_ends[1],
            report=write_ends[2],
            notices=notices,
        )
        environment = plan.environment | {
            "ASYNCPAR_REPORT_FD": str(streams.report),
            "ASYNCPAR_NOTICE_FD": str(streams.notices),
        }
        try:
            process = RankProcess.start(plan.command, environment, streams, self._tools.reaper)
        except BaseException:
            for descriptor in (*read_ends, notify):
                os.close(descriptor)
            raise
        finally:
            for descriptor in (*write_ends, notices):
                os.close(descriptor)
        self._notices[plan.place.local_rank] = notify
        output = RankOutput(
            plan.place,
            read_ends,
            files,
            display=self._tools.display,
            logs=self._tools.logs,
            on_broken=self._tools.on_broken_output,
            on_phase=lambda: self._tell_state(plan),
        )
        return process, output

    def _open_logs(self, plan: RankPlan) -> dict[Streams, FileIO]:
        place = plan.place
        files = {
            stream: self._tools.logs.open(
                stream, attempt=place.restart_count, rank=place.rank, local_rank=place.local_rank
            )
            for stream in (Streams.STDOUT, Streams.STDERR)
        }
        return {stream: file for stream, file in files.items() if file is not None}

    async def _watch(self, plan: RankPlan, process: RankProcess, output: RankOutput, tasks: asyncio.TaskGroup) -> None:
        """Follow one rank from its start until nothing of it is left."""
        relaying = tasks.create_task(output.run())
        returncode = await process.wait()
        os.close(self._notices.pop(plan.place.local_rank))
        ended_at = time.time()
        await output.settle()
        report = output.failure
        self._tools.on_rank_end(
            RankEnd(
                **_who(plan.place),
                pid=process.pid,
                returncode=returncode,
                at=ended_at if report is None else min(report.time, ended_at),
                report=report,
                stderr_tail=output.stderr_tail,
            )
        )
        await process.clear(grace=self._tools.grace)
        await output.drain(relaying)

    async def _look_after(self) -> None:
        """Check at intervals whether the ranks that have not ended are running."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for plan in self._plans:
                local_rank = plan.place.local_rank
                if local_rank in self._notices and local_rank not in self._killed:  # has not ended
                    is_stopped = self._processes[local_rank].is_stopped
                    if self._outputs[local_rank].vitals.look(is_stopped=is_stopped, now=loop.time()):
                        self._tell_state(plan)

    def _tell_state(self, plan: RankPlan) -> None:
        place, vitals = plan.place, self._outputs[plan.place.local_rank].vitals
        self._tools.on_state(
            RankState(
                generation=place.generation,
                rank=place.rank,
                phase=vitals.phase,
                condition=vitals.condition,
                seconds=vitals.seconds,
            )
        )


def _who(place: LaunchEnvironment) -> dict[str, Any]:
    return {name: getattr(place, name) for name in ("generation", "rank", "local_rank", "host")}


def _standard_input(rank: int) -> int:
    """Return the descriptor of stdin: rank 0 inherits the launcher's, unless it is a terminal; others get none."""
    try:
        return 0 if rank == 0 and not os.isatty(0) and os.fstat(0) else subprocess.DEVNULL
    except OSError:  # closed
        return subprocess.DEVNULL
