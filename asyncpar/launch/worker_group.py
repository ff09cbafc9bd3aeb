"""The ranks of one generation on one host: start them, relay their output, report the end of each."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from asyncpar import errors
from asyncpar.core.config.environment import ELASTIC_PIPE, LaunchEnvironment
from asyncpar.core.observe.agent_line import Loss, encode_condition, encode_loss
from asyncpar.core.observe.rank_reports import FailureReport
from asyncpar.core.observe.recorder import RING_FD
from asyncpar.core.observe.stack_dump import STACKS_FD, read_stack_dump
from asyncpar.core.system_errors import os_reason
from asyncpar.errors import LaunchError, PeerError
from asyncpar.launch.display import Display
from asyncpar.launch.failure import RankEnd, describe_cause
from asyncpar.launch.host_watch import HostWatch
from asyncpar.launch.options import Streams
from asyncpar.launch.post_mortem import PostMortem
from asyncpar.launch.rank_files import RankFiles
from asyncpar.launch.rank_output import RankLogs, RankOutput
from asyncpar.launch.rank_process import ChildStreams, RankProcess, find_room
from asyncpar.launch.reaper_client import ReaperClient
from asyncpar.launch.tracebacks import find_traceback, shorten
from asyncpar.launch.vitals import LOOK_SECONDS, Condition, RankState
from asyncpar.launch.wait_board import WaitReport
from asyncpar.observe.service import OBSERVE_FD
from asyncpar.observe.stack_views import ProcessStacks, crash_line
from asyncpar.observe.summary import unpack

_CANNOT_START = 126
_TAIL_CHARACTERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """The command and environment of one rank; ``place`` is the part of the environment that the launcher sets.

    ``director`` is the rank's end of its pipe to the process that sends it worlds; it is closed here once the rank has
    it.  ``directory`` is the working directory in which it starts (None: here).
    """

    command: tuple[str, ...]
    environment: dict[str, str]
    place: LaunchEnvironment
    director: int | None = None
    directory: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGroupTools:
    """Callbacks and services shared by the worker groups of all generations.

    ``on_broken_output`` gets the reason ("": the reader closed its end), ``on_state`` each state that has changed,
    ``on_report`` reports of ranks on what they wait for, ``on_output`` all of their output (``b""`` at the end of a
    stream).  With ``holds_tracebacks`` the final tracebacks of ranks are not shown, since ``on_rank_end`` reports them;
    with ``full_traceback`` that report has all frames.
    """

    reaper: ReaperClient
    display: Display
    logs: RankLogs
    watch: HostWatch
    grace: float
    on_rank_end: Callable[[RankEnd], None]
    on_state: Callable[[RankState], None]
    on_broken_output: Callable[[str], None]
    on_report: Callable[[WaitReport], None] = lambda _: None
    on_output: Callable[[int, Streams, bytes], None] | None = None
    holds_tracebacks: bool = False
    full_traceback: bool = False
    post_mortem: PostMortem | None = None


class WorkerGroup:
    """The processes of one generation; runs once.  ``signal`` and ``kill`` may be called at any time, even before."""

    def __init__(self, plans: Sequence[RankPlan], tools: WorkerGroupTools) -> None:
        self._plans = plans
        self._tools = tools
        self._processes: dict[int, RankProcess] = {}
        self._outputs: dict[int, RankOutput] = {}
        self._notices: dict[int, int] = {}
        """By local rank: the pipe that notifies it of lost ranks."""
        self._files = RankFiles(tools.logs, tools.post_mortem)
        self._watches: list[asyncio.Task[None]] = []
        self._killed: set[int] = set()
        self._pending_signal: int | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._keeping: asyncio.Task[None] | None = None
        """Keeps the stacks for a post-mortem; they are kept once, when the job begins to end."""
        self._has_reported_loss = False

    async def run(self) -> None:
        """Run all ranks; return when every process group is gone and all output has been passed on."""
        try:
            await self._run()
        finally:
            for process in self._processes.values():
                process.reap()
            self._files.close()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for plan in self._plans:
                await find_room()
                self._start(plan, tasks)
            for process in self._processes.values():
                process.go()
            watching = tasks.create_task(self._inspect())
            if self._pending_signal is not None:
                self.signal(self._pending_signal)
            if self._watches:
                await asyncio.wait(self._watches)
            self._tasks = None
            watching.cancel()
        await self._tools.display.finish()

    @property
    def pids(self) -> dict[int, int]:
        """The process ids of the started processes, by local rank."""
        return {local_rank: process.pid for local_rank, process in self._processes.items()}

    @property
    def images(self) -> dict[int, bytes]:
        """The images of the event rings of all ranks that were started here, by rank, dead ones included.

        Available until ``run`` returns.
        """
        ranks = {plan.place.local_rank: plan.place.rank for plan in self._plans}
        return {ranks[local_rank]: image for local_rank, image in self._files.images.items()}

    def signal(self, number: int) -> None:
        """Send ``number`` to the process group of every rank."""
        self._pending_signal = number
        if number == signal.SIGKILL:
            self._send(number)
        else:
            self._after_stacks(lambda: self._send(number))

    def _send(self, number: int) -> None:
        for process in self._processes.values():
            process.signal(number)

    def _after_stacks(self, act: Callable[[], None]) -> None:
        """Call ``act`` when the stacks of all ranks are kept, which takes at most a second; now if none are."""
        if self._tools.post_mortem is None or self._tasks is None or not self._processes:
            act()
            return
        if self._keeping is None:
            self._keeping = self._tasks.create_task(self._keep_stacks(self._tools.post_mortem))
        self._keeping.add_done_callback(lambda _: act())

    async def _keep_stacks(self, post_mortem: PostMortem) -> None:
        generation = self._plans[0].place.generation
        for answer in await self._tools.watch.collect("stacks"):
            with suppress(msgspec.DecodeError):  # it has nothing to report, for instance because it is stopped
                post_mortem.add_stacks(generation, unpack(answer.content, ProcessStacks))

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
                self._after_stacks(partial(self._processes[plan.place.local_rank].signal, signal.SIGKILL))

    def notify_loss(self, loss: Loss) -> None:
        """Notify every rank, except the lost one, of a loss."""
        self._has_reported_loss = True
        self._notify(loss.rank, lambda generation: encode_loss(loss, generation=generation))

    def notify_condition(self, rank: int, how: str) -> None:
        """Notify every rank, except ``rank``, of the condition of that one, which cannot report it itself."""
        self._notify(rank, lambda generation: encode_condition(rank, how, generation=generation))

    def _notify(self, about: int, encode: Callable[[int], bytes]) -> None:
        for plan in self._plans:
            line = encode(plan.place.generation)
            descriptor = self._notices.get(plan.place.local_rank)
            if descriptor is not None and plan.place.rank != about:
                with suppress(BlockingIOError, BrokenPipeError):  # it does not listen, or is gone
                    os.write(descriptor, line)

    def _start(self, plan: RankPlan, tasks: asyncio.TaskGroup) -> None:
        try:
            process, output = self._spawn(plan)
        except (OSError, LaunchError) as error:
            reason = f"the process could not be started: {os_reason(error)}"
            report = FailureReport(type_name=type(error).__name__, message=reason, traceback="")
            self._tools.on_rank_end(
                RankEnd(**_who(plan.place), pid=0, returncode=_CANNOT_START, at=time.monotonic(), report=report)
            )
            return
        self._processes[plan.place.local_rank] = process
        self._outputs[plan.place.local_rank] = output
        self._watches.append(tasks.create_task(self._watch(plan, process, output, tasks)))

    def _spawn(self, plan: RankPlan) -> tuple[RankProcess, RankOutput]:
        """Start the trampoline with its pipes.  On an error, no descriptor stays open."""
        try:
            logs = self._files.open_logs(plan.place)
        except OSError:
            if plan.director is not None:
                os.close(plan.director)
            raise
        read_ends, write_ends = zip(*(os.pipe() for _ in range(3)), strict=True)
        notices, notify = os.pipe()
        os.set_blocking(notify, False)
        asking, observed = socket.socketpair()
        streams = ChildStreams(
            stdin=_standard_input(plan.place.rank),
            stdout=write_ends[0],
            stderr=write_ends[1],
            report=write_ends[2],
            notices=notices,
            director=plan.director,
            ring=self._files.make_ring(plan.place),
            stacks=self._files.make_stacks(plan.place),
            observed=observed.detach(),
        )
        environment = plan.environment | _descriptors(streams)
        try:
            process = RankProcess.start(
                plan.command, environment, streams, self._tools.reaper, directory=plan.directory
            )
        except BaseException:
            for descriptor in (*read_ends, notify, asking.detach()):
                os.close(descriptor)
            raise
        finally:
            for descriptor in (*write_ends, *streams.inherited[1:]):
                os.close(descriptor)
        self._notices[plan.place.local_rank] = notify
        output = RankOutput(
            plan.place,
            read_ends,
            logs,
            display=self._tools.display,
            logs=self._tools.logs,
            on_broken=self._tools.on_broken_output,
            on_phase=lambda: self._report_state(plan),
            on_report=self._tools.on_report,
            holds_tracebacks=self._tools.holds_tracebacks,
            tails=self._files.open_tails(plan.place),
            on_output=self._tools.on_output,
        )
        answers = {
            "image": lambda: self._files.image(plan.place.local_rank),
            "output": output.recent.read,
            "tail": lambda: output.recent.tail(process.pid),
        }
        stacks = self._files.stacks.get(plan.place.local_rank)
        self._tools.watch.add(plan.place, process.pid, asking, answers, stacks, output.relocate)
        return process, output

    async def _watch(self, plan: RankPlan, process: RankProcess, output: RankOutput, tasks: asyncio.TaskGroup) -> None:
        """Follow one rank from its start until nothing of it is left."""
        relaying = tasks.create_task(output.run())
        returncode = await process.wait()
        os.close(self._notices.pop(plan.place.local_rank))
        ended_at = time.monotonic()
        await output.settle()
        report = self._report(output, returncode)
        end = RankEnd(
            **_who(plan.place),
            pid=process.pid,
            lost=self._kernel_kill(plan, returncode),
            returncode=returncode,
            at=ended_at if report is None or not report.time else min(report.time, ended_at),
            report=report,
            stderr_tail="" if report is not None else self._last_words(plan, output, returncode),
            stderr_file=output.stderr_file,
        )
        is_own = returncode != 0 and self._pending_signal is None and not end.is_peer_error
        cause = describe_cause([end]) if is_own else ""
        self._tools.watch.ended(plan.place, end.account, cause, at=end.at, blames=end.blames, call=end.call)
        if returncode:
            self._after_stacks(lambda: None)
        self._tools.on_rank_end(end)
        is_reported = (
            self._pending_signal is None or self._has_reported_loss
        )  # of a failure; not if the job was interrupted
        await output.end(has_failed=report is not None and is_reported)
        await process.clear(grace=self._tools.grace)
        await output.drain(relaying)

    def _kernel_kill(self, plan: RankPlan, returncode: int) -> str:
        """Return that the kernel was out of memory, if that is why a rank was killed; else ""."""
        is_ours = plan.place.local_rank in self._killed or self._pending_signal == signal.SIGKILL
        return (
            "" if returncode != -signal.SIGKILL or is_ours else self._tools.watch.memory.explain(now=time.monotonic())
        )

    def _last_words(self, plan: RankPlan, output: RankOutput, returncode: int) -> str:
        """Return the end of a rank's stderr; after a crash also its place, if that is known."""
        tail = output.stderr_tail[-_TAIL_CHARACTERS:]
        stacks = self._files.stacks.get(plan.place.local_rank)
        crash = "" if returncode >= 0 or stacks is None else crash_line(read_stack_dump(stacks.descriptor))
        return "\n".join(filter(None, (tail.rstrip("\n"), crash))) if crash and crash_line(tail) == "" else tail

    def _report(self, output: RankOutput, returncode: int) -> FailureReport | None:
        """Return the exception that has ended a rank, from its own report or from its stderr."""
        report = output.failure
        if report is None and returncode == 1 and (found := find_traceback(output.stderr_tail)):
            module, name, message, traceback = found
            is_ours = module == PeerError.__module__ and issubclass(getattr(errors, name, Exception), PeerError)
            report = FailureReport(type_name=name, message=message, traceback=traceback, is_peer_error=is_ours)
        if report is None or self._tools.full_traceback:
            return report
        if output.has_shown(report.traceback):
            return msgspec.structs.replace(report, traceback="(its traceback is in its output above)")
        return msgspec.structs.replace(report, traceback=shorten(report.traceback))

    async def _inspect(self) -> None:
        """Check at intervals whether the ranks that have not ended are running."""
        loop = asyncio.get_running_loop()
        sizes: dict[int, int] = {}
        while True:
            self._tools.watch.memory.update(sizes, now=time.monotonic())
            await asyncio.sleep(LOOK_SECONDS)
            for plan in self._plans:
                local_rank = plan.place.local_rank
                if local_rank in self._notices and local_rank not in self._killed:  # has not ended
                    seen = self._processes[local_rank].sample()
                    sizes[plan.place.rank] = seen.resident
                    if self._outputs[local_rank].vitals.update(seen, now=loop.time()):
                        self._report_state(plan)

    def _report_state(self, plan: RankPlan) -> None:
        place, vitals = plan.place, self._outputs[plan.place.local_rank].vitals
        state = RankState(
            generation=place.generation,
            rank=place.rank,
            phase=vitals.phase,
            condition=vitals.condition,
            seconds=vitals.seconds,
            place="" if vitals.condition is Condition.WELL else self._tools.watch.find_place(place),
        )
        self._tools.watch.take_state(place, state)
        self._tools.on_state(state)


def _who(place: LaunchEnvironment) -> dict[str, Any]:
    return {name: getattr(place, name) for name in ("generation", "rank", "local_rank", "host")}


def _descriptors(streams: ChildStreams) -> dict[str, str]:
    """Return the environment variables by which a rank finds its inherited descriptors."""
    numbers = {
        "ASYNCPAR_REPORT_FD": streams.report,
        "ASYNCPAR_NOTICE_FD": streams.notices,
        OBSERVE_FD: streams.observed,
        RING_FD: streams.ring,
        STACKS_FD: streams.stacks,
        ELASTIC_PIPE: streams.director,
    }
    return {name: str(number) for name, number in numbers.items() if number is not None}


def _standard_input(rank: int) -> int:
    """Return the descriptor of stdin: rank 0 inherits the launcher's, unless it is a terminal; others get none."""
    try:
        return 0 if rank == 0 and not os.isatty(0) and os.fstat(0) else subprocess.DEVNULL
    except OSError:  # closed
        return subprocess.DEVNULL
