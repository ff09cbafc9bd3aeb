"""One start of one rank: its process, its output, what outlives it, and the report of its end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from typing import Any

import msgspec

from asyncpar import errors
from asyncpar.core.config.environment import ELASTIC_PIPE, LaunchEnvironment
from asyncpar.core.observe.agent_line import Loss, encode_condition, encode_loss
from asyncpar.core.observe.rank_reports import FailureReport
from asyncpar.core.observe.recorder import RING_FD, make_ring, read_ring
from asyncpar.core.observe.stack_dump import STACKS_FD, read_stack_dump
from asyncpar.core.private_files import open_unnamed
from asyncpar.core.system_errors import os_reason
from asyncpar.errors import LaunchError, PeerError
from asyncpar.launch.display import Display
from asyncpar.launch.failure import RankEnd, describe_cause
from asyncpar.launch.host_watch import HostWatch
from asyncpar.launch.options import Streams
from asyncpar.launch.post_mortem import PostMortem, TailFile
from asyncpar.launch.rank_output import RankLogs, RankOutput
from asyncpar.launch.rank_process import ChildStreams, RankProcess
from asyncpar.launch.reaper_client import ReaperClient
from asyncpar.launch.stack_files import StackFile
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
class RankTools:
    """Callbacks and services shared by all ranks of a job on one host.

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


class RankRun:
    """One start of one rank; runs once.  ``signal`` and ``kill`` may be called at any time, even before."""

    def __init__(self, plan: RankPlan, tools: RankTools) -> None:
        self._plan = plan
        self._tools = tools
        self._process: RankProcess | None = None
        self._output: RankOutput | None = None
        self._notify_at: int | None = None
        """The pipe that notifies it of lost ranks."""
        self._files = RankFiles(tools.logs, tools.post_mortem)
        self._pending_signal: int | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._keeping: asyncio.Task[None] | None = None
        """Keeps the stacks of all ranks here for a post-mortem, once, when this one is to end or has failed."""
        self._has_reported_loss = False

    async def run(self) -> None:
        """Run the rank; return when its process group is gone and all output has been passed on."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                if self._start():
                    assert self._process is not None
                    assert self._output is not None
                    self._process.go()
                    inspecting = tasks.create_task(self._inspect(self._process, self._output))
                    if self._pending_signal is not None:
                        self.signal(self._pending_signal)
                    await self._watch(self._process, self._output, tasks)
                    inspecting.cancel()
                self._tasks = None
        finally:
            if self._process is not None:
                self._process.reap()
            self._files.close()

    @property
    def pid(self) -> int | None:
        """The process id of the started process."""
        return None if self._process is None else self._process.pid

    def signal(self, number: int) -> None:
        """Send ``number`` to the process group."""
        self._pending_signal = number
        if number == signal.SIGKILL:
            self._send(number)
        else:
            self._after_stacks(lambda: self._send(number))

    def _send(self, number: int) -> None:
        if self._process is not None:
            self._process.signal(number)

    def _after_stacks(self, act: Callable[[], None]) -> None:
        """Call ``act`` when the stacks of the ranks are kept, which takes at most a second; now if none are."""
        if self._tools.post_mortem is None or self._tasks is None or self._process is None:
            act()
            return
        if self._keeping is None:
            self._keeping = self._tasks.create_task(self._keep_stacks(self._tools.post_mortem))
        self._keeping.add_done_callback(lambda _: act())

    async def _keep_stacks(self, post_mortem: PostMortem) -> None:
        for answer in await self._tools.watch.collect("stacks"):
            with suppress(msgspec.DecodeError):  # it has nothing to report, for instance because it is stopped
                post_mortem.add_stacks(self._plan.place.generation, unpack(answer.content, ProcessStacks))

    def kill(self) -> None:
        """Kill the process group, and stop waiting for readers of our output."""
        self.signal(signal.SIGKILL)
        if self._output is not None:
            self._output.abandon()

    def notify_loss(self, loss: Loss) -> None:
        """Notify the rank, unless it is the lost one, of a loss."""
        self._has_reported_loss = True
        self._notify(loss.rank, encode_loss(loss, generation=self._plan.place.generation))

    def notify_condition(self, rank: int, how: str) -> None:
        """Notify the rank, unless it is ``rank``, of the condition of that one, which cannot report it itself."""
        self._notify(rank, encode_condition(rank, how, generation=self._plan.place.generation))

    def _notify(self, about: int, line: bytes) -> None:
        if self._notify_at is not None and self._plan.place.rank != about:
            with suppress(BlockingIOError, BrokenPipeError):  # it does not listen, or is gone
                os.write(self._notify_at, line)

    def _start(self) -> bool:
        """Start the process; report its end at once if it cannot be started."""
        try:
            self._process, self._output = self._spawn()
        except (OSError, LaunchError) as error:
            reason = f"the process could not be started: {os_reason(error)}"
            report = FailureReport(type_name=type(error).__name__, message=reason, traceback="")
            who = _who(self._plan.place)
            end = RankEnd(**who, pid=0, returncode=_CANNOT_START, at=time.monotonic(), report=report)
            self._tools.on_rank_end(end)
            return False
        return True

    def _spawn(self) -> tuple[RankProcess, RankOutput]:
        """Start the trampoline with its pipes.  On an error, no descriptor stays open."""
        plan = self._plan
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
        self._notify_at = notify
        output = RankOutput(
            plan.place,
            read_ends,
            logs,
            display=self._tools.display,
            logs=self._tools.logs,
            on_broken=self._tools.on_broken_output,
            on_phase=self._report_state,
            on_report=self._tools.on_report,
            holds_tracebacks=self._tools.holds_tracebacks,
            tails=self._files.open_tails(plan.place),
            on_output=self._tools.on_output,
        )
        answers = {
            "image": self._files.image,
            "output": output.recent.read,
            "tail": lambda: output.recent.tail(process.pid),
        }
        self._tools.watch.add(plan.place, process.pid, asking, answers, self._files.stacks, output.relocate)
        return process, output

    async def _watch(self, process: RankProcess, output: RankOutput, tasks: asyncio.TaskGroup) -> None:
        """Follow the rank from its start until nothing of it is left."""
        place = self._plan.place
        relaying = tasks.create_task(output.run())
        returncode = await process.wait()
        assert self._notify_at is not None
        os.close(self._notify_at)
        self._notify_at = None
        ended_at = time.monotonic()
        await output.settle()
        report = self._report(output, returncode)
        end = RankEnd(
            **_who(place),
            pid=process.pid,
            lost=self._kernel_kill(returncode),
            returncode=returncode,
            at=ended_at if report is None or not report.time else min(report.time, ended_at),
            report=report,
            stderr_tail="" if report is not None else self._last_words(output, returncode),
            stderr_file=output.stderr_file,
        )
        is_own = returncode != 0 and self._pending_signal is None and not end.is_peer_error
        cause = describe_cause([end]) if is_own else ""
        self._tools.watch.ended(place, end.account, cause, at=end.at, blames=end.blames, call=end.call)
        if returncode:
            self._after_stacks(lambda: None)
        self._tools.on_rank_end(end)
        is_reported = (
            self._pending_signal is None or self._has_reported_loss
        )  # of a failure; not if the job was interrupted
        await output.end(has_failed=report is not None and is_reported)
        await process.clear(grace=self._tools.grace)
        await output.drain(relaying)

    def _kernel_kill(self, returncode: int) -> str:
        """Return that the kernel was out of memory, if that is why the rank was killed; else ""."""
        is_ours = self._pending_signal == signal.SIGKILL
        return (
            "" if returncode != -signal.SIGKILL or is_ours else self._tools.watch.memory.explain(now=time.monotonic())
        )

    def _last_words(self, output: RankOutput, returncode: int) -> str:
        """Return the end of the rank's stderr; after a crash also its place, if that is known."""
        tail, stacks = output.stderr_tail[-_TAIL_CHARACTERS:], self._files.stacks
        crash = "" if returncode >= 0 or stacks is None else crash_line(read_stack_dump(stacks.descriptor))
        return "\n".join(filter(None, (tail.rstrip("\n"), crash))) if crash and crash_line(tail) == "" else tail

    def _report(self, output: RankOutput, returncode: int) -> FailureReport | None:
        """Return the exception that has ended the rank, from its own report or from its stderr."""
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

    async def _inspect(self, process: RankProcess, output: RankOutput) -> None:
        """Check at intervals whether the rank is running, as long as it has not ended."""
        loop, memory = asyncio.get_running_loop(), self._tools.watch.memory
        memory.update({}, now=time.monotonic())
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._notify_at is None:
                return
            seen = process.sample()
            memory.update({self._plan.place.rank: seen.resident}, now=time.monotonic())
            if output.vitals.update(seen, now=loop.time()):
                self._report_state()

    def _report_state(self) -> None:
        assert self._output is not None
        place, vitals = self._plan.place, self._output.vitals
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


class RankFiles:
    """The files and the memory of a rank that outlive it: its event ring, stacks, logs and last output.

    With ``post_mortem`` they have names there.
    """

    def __init__(self, logs: RankLogs, post_mortem: PostMortem | None) -> None:
        self._logs = logs
        self._post_mortem = post_mortem
        self._ring: int | None = None
        """The memory in which the rank records events."""
        self.stacks: StackFile | None = None
        """The file for its stacks when it does not answer."""

    def image(self) -> bytes:
        """Return the image of the event ring, b"" if there is none."""
        return b"" if self._ring is None else read_ring(self._ring)

    def make_ring(self, place: LaunchEnvironment) -> int | None:
        """Return memory for the events of the rank; None where the system has none: the rank then uses its own."""
        try:
            if self._post_mortem is None:
                self._ring = make_ring(f"asyncpar events of rank {place.rank}")
            else:
                self._ring = self._post_mortem.make_ring(place)
        except OSError:
            return None
        return self._ring

    def make_stacks(self, place: LaunchEnvironment) -> int | None:
        """Return a descriptor of a file for the stacks of the rank; None where the system has none."""
        try:
            if self._post_mortem is None:
                descriptor = open_unnamed(f"asyncpar stacks of rank {place.rank}")
            else:
                descriptor = self._post_mortem.make_stack_file(place)
        except OSError:
            return None
        self.stacks = StackFile(descriptor)
        return descriptor

    def open_tails(self, place: LaunchEnvironment) -> dict[Streams, TailFile]:
        """Return the files for the last output of the rank."""
        if self._post_mortem is None:
            return {}
        return {
            Streams.STDOUT: self._post_mortem.open_log(place, "stdout"),
            Streams.STDERR: self._post_mortem.open_log(place, "stderr"),
        }

    def open_logs(self, place: LaunchEnvironment) -> dict[Streams, FileIO]:
        """Return the log files of the rank.  Raises ``OSError``."""
        files = {
            stream: self._logs.open(stream, attempt=place.generation, rank=place.rank)
            for stream in (Streams.STDOUT, Streams.STDERR)
        }
        return {stream: file for stream, file in files.items() if file is not None}

    def close(self) -> None:
        """Close everything; files that have a name stay."""
        if self._ring is not None:
            os.close(self._ring)
        if self.stacks is not None:
            self.stacks.close()
        self._ring = self.stacks = None


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
