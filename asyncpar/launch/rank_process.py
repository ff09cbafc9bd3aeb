"""One rank's process: start it through the trampoline, signal its group, know when all of the group is gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from asyncpar.launch.guard import Guard

_TRAMPOLINE = Path(__file__).with_name("trampoline.py")
_POLL_EVERY = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """The descriptors that the child gets; the parent closes its copies once the child has them."""

    stdin: int
    stdout: int
    stderr: int
    report: int


class RankProcess:
    """A process that leads a session and a process group of its own, known to the reaper before it runs anything."""

    def __init__(self, process: asyncio.subprocess.Process, guard: Guard, go: int) -> None:
        self._process = process
        self._guard = guard
        self._go: int | None = go
        self.pid = process.pid

    @classmethod
    async def start(
        cls, command: Sequence[str], environment: Mapping[str, str], streams: Streams, guard: Guard
    ) -> RankProcess:
        """Start the trampoline for ``command``; nothing of it runs before ``go``.  Raises ``OSError``."""
        read_end, write_end = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_TRAMPOLINE), str(read_end), str(os.getpid()), *command),
                stdin=streams.stdin,
                stdout=streams.stdout,
                stderr=streams.stderr,
                env=dict(environment),
                pass_fds=(read_end, streams.report),
                start_new_session=True,
            )
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        rank = cls(process, guard, write_end)
        guard.add_group(rank.pid)
        return rank

    def go(self) -> None:
        """Let the command run."""
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

    async def wait(self) -> int:
        """Return the leader's return code once it ended; others of its group may still run."""
        code = await self._process.wait()
        if self._go is not None:
            os.close(self._go)
            self._go = None
        return code

    async def clear(self) -> None:
        """End what the leader left in its group and return when that is gone; SIGKILL is up to the caller."""
        if is_group_alive(self.pid):
            self.signal(signal.SIGTERM)
            while is_group_alive(self.pid):
                await asyncio.sleep(_POLL_EVERY)
        self._guard.forget_group(self.pid)


def is_group_alive(group: int) -> bool:
    """Does any process of ``group`` still run?  Zombies do not."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return any(_is_running_in(group, pid) for pid in psutil.pids())


def _is_running_in(group: int, pid: int) -> bool:
    try:
        return os.getpgid(pid) == group and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def null_input() -> int:
    """Return a value for ``Streams.stdin`` that reads as empty."""
    return subprocess.DEVNULL
