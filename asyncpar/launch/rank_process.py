"""The process of one rank: make its command line and environment, start it, signal its group, wait for its end.

It starts through the trampoline, and has ended when no process of its group is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.machinery
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from asyncpar.core.concurrency.worker import call_in_daemon_thread
from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.core.descriptors import has_room, is_exhausted
from asyncpar.core.observe.rank_observer import WAIT_WARNING
from asyncpar.errors import UsageError
from asyncpar.launch.options import ProgramKind
from asyncpar.launch.reaper_client import ReaperClient
from asyncpar.launch.vitals import ProcessSample

_TRAMPOLINE = Path(__file__).with_name("trampoline.py")
_POLL_EVERY = 0.05
_KILL_PATIENCE = 5.0
_REAP_PATIENCE = 1.0
_ROOM_PATIENCE = 10.0
_DESCRIPTORS_OF_A_START = 24
"""Most descriptors that are open while a rank is started: the rank's, ours, and those of ``subprocess``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildStreams:
    """The descriptors that the child gets; the parent closes its copies once the child has them."""

    stdin: int
    stdout: int
    stderr: int
    report: int
    notices: int
    director: int | None = None
    """The rank's end of its pipe to the process that sends it worlds; None: it has none."""
    ring: int | None = None
    """The memory in which the rank records events; the parent keeps it open."""
    stacks: int | None = None
    """The file to which the rank writes its stacks when it can do nothing else; the parent keeps it open."""
    observed: int | None = None
    """The rank's end of the connection over which the agent queries it; None: it is not queried."""

    @property
    def inherited(self) -> tuple[int, ...]:
        """Descriptors that keep their numbers."""
        others = (each for each in (self.director, self.observed) if each is not None)
        return (self.report, self.notices, *others)

    @property
    def shared(self) -> tuple[int, ...]:
        """Descriptors that the parent keeps, too; they keep their numbers."""
        return tuple(each for each in (self.ring, self.stacks) if each is not None)


class RankProcess:
    """A process that leads a session and a process group of its own, known to the reaper before it runs anything.

    Started with ``subprocess``, which uses vfork: a plain fork (as uvloop does) runs the fork handlers of gRPC in a
    child that has none of its threads, and may crash there.
    """

    def __init__(self, process: subprocess.Popen[bytes], reaper: ReaperClient, go: int) -> None:
        self._process = process
        self._reaper = reaper
        self._go: int | None = go
        self.pid = process.pid

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        streams: ChildStreams,
        reaper: ReaperClient,
        *,
        directory: str | None = None,
    ) -> RankProcess:
        """Start the trampoline for ``command`` in ``directory`` (None: here); the command does not run before ``go``.

        Raises ``OSError`` and ``LaunchError``; then no process is left.
        """
        read_end, write_end = os.pipe()
        try:
            with _interrupt_blocked():
                process = subprocess.Popen(
                    (sys.executable, "-I", "-S", str(_TRAMPOLINE), str(read_end), str(os.getpid()), *command),
                    stdin=streams.stdin,
                    stdout=streams.stdout,
                    stderr=streams.stderr,
                    env=environment,
                    cwd=directory,
                    pass_fds=(read_end, *streams.inherited, *streams.shared),
                    start_new_session=True,
                )
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        try:
            reaper.add_group(process.pid)
        except BaseException:
            os.close(write_end)  # ends the trampoline
            process.wait()
            raise
        return cls(process, reaper, write_end)

    def go(self) -> None:
        """Run the command."""
        if self._go is None:
            return
        with contextlib.suppress(BrokenPipeError):  # it was killed while it waited
            os.write(self._go, b"g")
        os.close(self._go)
        self._go = None

    def signal(self, number: int) -> None:
        """Send ``number`` to all processes of the group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def sample(self) -> ProcessSample:
        """Inspect the leader.  It counts as running if no file can be opened."""
        try:
            leader = psutil.Process(self.pid)
            with leader.oneshot():
                status, times, resident = leader.status(), leader.cpu_times(), leader.memory_info().rss
        except psutil.NoSuchProcess:
            return ProcessSample()
        except OSError as error:
            if not is_exhausted(error):
                raise
            return ProcessSample()
        return ProcessSample(
            is_stopped=status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP),
            is_uninterruptible=status == psutil.STATUS_DISK_SLEEP,
            cpu=times.user + times.system,
            resident=resident,
        )

    async def wait(self) -> int:
        """Return the leader's return code when it has ended; others of its group may still run."""
        await _wait_for_end(self._process)
        if self._go is not None:
            os.close(self._go)
            self._go = None
        return self._process.wait()

    def reap(self) -> None:
        """Kill the group and reap the leader, if the wait for its end was cancelled."""
        if self._process.returncode is None:
            self.signal(signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel does not release it; the reaper knows it
                self._process.wait(_REAP_PATIENCE)

    async def clear(self, *, grace: float) -> None:
        """End the processes that the leader left in its group: SIGTERM, then SIGKILL after ``grace`` seconds."""
        if not await self._is_gone(within=0.0):
            self.signal(signal.SIGTERM)
            if not await self._is_gone(within=grace):
                self.signal(signal.SIGKILL)
                await self._is_gone(within=_KILL_PATIENCE)
        self._reaper.forget_group(self.pid)

    async def _is_gone(self, *, within: float) -> bool:
        """Poll until the group is empty: the kernel does not report that for processes that are not our children."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within
        while is_group_alive(self.pid):
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(_POLL_EVERY)
        return True


async def find_room() -> None:
    """Wait, for a bounded time, until there are descriptors for one more rank; after that, opening them fails."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _ROOM_PATIENCE
    while not has_room(_DESCRIPTORS_OF_A_START) and loop.time() < deadline:  # noqa: ASYNC110 - no event reports it
        await asyncio.sleep(_POLL_EVERY)


@contextlib.contextmanager
def _interrupt_blocked() -> Iterator[None]:
    """Start children with SIGINT blocked: a Ctrl-C waits until the trampoline can end without a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def _wait_for_end(process: subprocess.Popen[bytes]) -> None:
    """Return when ``process.wait()`` would not block."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    try:
        descriptor = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # not Linux, or one without pidfds: a thread waits
        await call_in_daemon_thread(process.wait, f"asyncpar process {process.pid}")
        return
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def is_group_alive(group: int) -> bool:
    """Return whether any process of ``group`` still runs.

    Zombies do not, unless no file can be opened to see that they are.
    """
    try:
        os.killpg(group, 0)
        return any(_is_running_in(group, pid) for pid in psutil.pids())
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    except OSError as error:
        if not is_exhausted(error):
            raise
        return True


def _is_running_in(group: int, pid: int) -> bool:
    try:
        return os.getpgid(pid) == group and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def rank_command(kind: ProgramKind, program: str, arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command line.  Raises ``UsageError`` when there is no such script, module or program here."""
    match kind:
        case ProgramKind.SCRIPT:
            _check_script(program)
        case ProgramKind.MODULE:
            _check_module(program)
        case ProgramKind.PROGRAM:
            if shutil.which(program) is None:
                raise UsageError(f"program: {program} is not an executable file, nor one on PATH")
    return command_line(kind, program, arguments)


def command_line(kind: ProgramKind, program: str, arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command line, without checking that the program exists."""
    start = {ProgramKind.SCRIPT: (sys.executable,), ProgramKind.MODULE: (sys.executable, "-m"), ProgramKind.PROGRAM: ()}
    return (*start[kind], program, *arguments)


def _check_script(script: str) -> None:
    path = Path(script)
    if not path.exists():
        raise UsageError(f"script: {script} does not exist (in {os.getcwd()})")
    if path.is_dir() and not (path / "__main__.py").exists():
        raise UsageError(f"script: {script} is a directory without __main__.py")
    if not os.access(path, os.R_OK):
        raise UsageError(f"script: {script} cannot be read: permission denied")


def _check_module(module: str) -> None:
    """Look for the top package of the dotted name only: finding the rest would import it."""
    top = module.partition(".")[0]
    is_there = top in sys.builtin_module_names or top in sys.stdlib_module_names
    if not is_there and importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is None:
        raise UsageError(f"module: {module} cannot be found; the search begins in {os.getcwd()}")


_OURS = "ASYNCPAR_"
_SETTINGS = frozenset(
    {
        "ASYNCPAR_ALGORITHM",
        "ASYNCPAR_ARENA_BYTES",
        "ASYNCPAR_ARENA_WAIT",
        "ASYNCPAR_CALIBRATE",
        "ASYNCPAR_CHECKSUMS",
        "ASYNCPAR_CONNECTIONS",
        "ASYNCPAR_LINK_TIMEOUT",
        "ASYNCPAR_NCCL_BETWEEN_HOSTS",
        "ASYNCPAR_TORCH_CUDA",
        WAIT_WARNING,
    }
)
"""Variables of asyncpar that users set for the ranks."""

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_DEFAULTS = {"PYTHONUNBUFFERED": "1", "GRPC_VERBOSITY": "ERROR"}


def rank_environment(base: Mapping[str, str], place: LaunchEnvironment) -> dict[str, str]:
    """Return ``base`` with the variables of ``place``.

    Variables of an outer launch are removed.  Output is unbuffered, and with several ranks on the host numeric
    libraries get one thread each, unless ``base`` sets that itself.
    """
    return _inherited(base, place.local_world_size) | place.to_mapping()


def elastic_environment(base: Mapping[str, str], place: LaunchEnvironment) -> dict[str, str]:
    """Return ``base`` with the variables of ``place`` for a rank that gets its worlds over a pipe.

    Its rank and the size of its world change, so no variable has them.
    """
    own = {name: value for name, value in place.to_mapping().items() if name in _ELASTIC}
    return _inherited(base, place.local_world_size) | own


_ELASTIC = frozenset(
    {
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "ASYNCPAR_SECRET_FILE",
        "ASYNCPAR_CERTS",
        "ASYNCPAR_JOB",
        "ASYNCPAR_HOST",
        "ASYNCPAR_BIND",
    }
)


def _inherited(base: Mapping[str, str], ranks_here: int) -> dict[str, str]:
    environment = {name: value for name, value in base.items() if name in _SETTINGS or not name.startswith(_OURS)}
    for name in ("RANK", "WORLD_SIZE"):  # of an outer launch
        environment.pop(name, None)
    defaults = dict(_DEFAULTS)
    if ranks_here > 1:
        defaults |= dict.fromkeys(_THREADS, "1")
    for name, value in defaults.items():
        environment.setdefault(name, value)
    return environment
