"""Rank processes are forked from one that has asyncpar imported, which takes a new interpreter longer than most tests.

With ``--soak`` each rank is an interpreter of its own.
"""

from __future__ import annotations

import asyncio
import os
import runpy
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import cache

from tests.fork_server import ForkedProcess, ForkServer

PRELOADED = (
    "uvloop",
    "asyncpar.runner",
    "asyncpar.collectives.calibration",
    "asyncpar.collectives.engine",
    "asyncpar.net.arena.formation",
    "asyncpar.net.transport.link",
    "asyncpar.observe.service",
    __name__,
)
"""What needs no grpc: a process that has imported it is never forked."""


class ForkedProgram:
    """A process that runs a program of Python, with what tests use of ``asyncio.subprocess.Process``."""

    def __init__(self, process: ForkedProcess, stdout: asyncio.StreamReader, stdin: asyncio.StreamWriter) -> None:
        self._process = process
        self.pid = process.pid
        self.stdout = stdout
        self.stdin = stdin

    @property
    def returncode(self) -> int | None:
        return self._process.wait() if self._process.has_ended() else None

    async def wait(self) -> int:
        return await self._process.until_ended()

    async def communicate(self) -> tuple[bytes, None]:
        """Return what is left of its output once it has ended."""
        await self.wait()
        rest = await self.stdout.read()
        self.stdin.close()
        await self.stdin.wait_closed()
        return rest, None

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


async def fork_program(command: Sequence[str], *, environment: Mapping[str, str]) -> ForkedProgram:
    """Run ``python -W error *command`` in the ``environment``."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = _server().start(
            f"{__name__}:run_program", command, environment=environment, log=2, channel=theirs.fileno()
        )
    return ForkedProgram(process, *await asyncio.open_unix_connection(sock=ours))


def run_program(channel: socket.socket, *command: str) -> None:
    """Be a program whose input and output are ``channel``."""
    for number in (0, 1):
        os.dup2(channel.fileno(), number)
    channel.close()
    sys.argv[:] = command
    sys.path[0] = os.path.dirname(command[0])
    runpy.run_path(command[0], run_name="__main__")


@cache
def _server() -> ForkServer:
    return ForkServer(PRELOADED, options=["-W", "error"])


def close_server() -> None:
    """End the process that programs are forked from, if there is one."""
    if _server.cache_info().currsize:
        _server().close()
        _server.cache_clear()
