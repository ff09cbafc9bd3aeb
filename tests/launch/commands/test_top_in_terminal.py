"""`asyncpar top` in pseudo-terminals of several sizes: pictures fit, keys and signals leave it as it was."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from asyncpar.launch.control_socket import serve_control
from asyncpar.launch.job_directory import JobEntry, make_job_directory, remove_job_directory
from asyncpar.observe.summary import JobSummary, RankAnswer
from tests.launch.commands.test_job_screen import hanging
from tests.soak import first

pytestmark = pytest.mark.process
LIMIT = 60.0


class Launcher:
    """Answers as the launcher of a job does, while it is ``answering``."""

    def __init__(self, directory: Path, job: JobSummary) -> None:
        self.environment = {"XDG_RUNTIME_DIR": str(directory)}
        self._job = job
        entry = JobEntry(job=job.job, pid=os.getpid(), host="a", started=0.0, command=())
        self.entry = make_job_directory(self.environment, entry)

    async def status(self) -> JobSummary:
        return self._job

    async def collect(self, kind: str, ranks: Iterable[int] | None) -> list[RankAnswer]:
        return []

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        async with serve_control(self.entry.socket_path, self):
            yield


class Terminal:
    """A pseudo-terminal with an `asyncpar top` in it; ``frames`` are the pictures that it has shown, as lines."""

    def __init__(self, columns: int, lines: int) -> None:
        self.ours, self.theirs = pty.openpty()
        self.resize(columns, lines)
        self.attributes = termios.tcgetattr(self.theirs)
        self.shown = b""

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def start(self, launcher: Launcher) -> None:
        clean = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "asyncpar", "top", "--every", "0.1"],
            env=clean | launcher.environment | {"TERM": "xterm"},
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
        )

    @property
    def frames(self) -> list[list[str]]:
        """Whole pictures: each begins at the upper left corner, and another one follows."""
        parts = self.shown.split(b"\x1b[H")[1:-1]
        texts = [re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", part).decode() for part in parts]
        return [[line.rstrip() for line in text.split("\r\n")] for text in texts if text.strip()]

    async def read_until(self, is_there: Callable[[], bool]) -> None:
        limit = time.monotonic() + LIMIT
        while not is_there():
            assert time.monotonic() < limit, self.shown
            if (await asyncio.to_thread(select.select, [self.ours], [], [], 0.05))[0]:
                self.shown += os.read(self.ours, 65536)

    async def ends_with(self, code: int) -> None:
        """Check how the command ends, and that nothing of it is left in the terminal."""
        await self.read_until(lambda: self.process.poll() is not None)
        await self.read_until(lambda: b"\x1b[?1049l" in self.shown)
        assert self.process.returncode == code
        assert termios.tcgetattr(self.theirs) == self.attributes

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal(40, 10)
    yield made
    made.close()


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    made = Launcher(tmp_path, hanging(12, 7))
    yield made
    remove_job_directory(made.entry)


async def test_what_matters_fits_a_small_terminal_that_grows_and_q_leaves(
    launcher: Launcher, terminal: Terminal
) -> None:
    async with launcher.answering():
        terminal.start(launcher)
        await terminal.read_until(lambda: len(terminal.frames) >= 2)
        for frame in terminal.frames:
            assert len(frame) <= 10
            assert max(map(len, frame)) <= 40
        troubles = " ".join(line.strip() for line in terminal.frames[-1])
        assert "wait for rank 7 (a), which is in user code at train.py:9" in troubles
        assert re.search(r"\.\.\. and \d+ more ranks", troubles)
        terminal.resize(100, 30)
        await terminal.read_until(lambda: any("q: leave" in frame for frame in terminal.frames))
        full = next(frame for frame in terminal.frames if "q: leave" in frame)
        assert len([line for line in full if re.match(r" *\d+  a ", line)]) == 12
        os.write(terminal.ours, b"xq")
        await terminal.ends_with(0)
    assert b"xq" not in terminal.shown, "keys are not shown"


@pytest.mark.parametrize(("number", "code"), first(1, [(signal.SIGINT, 0), (signal.SIGTERM, 128 + signal.SIGTERM)]))
async def test_signals_leave_the_terminal_as_it_was(
    launcher: Launcher, terminal: Terminal, number: int, code: int
) -> None:
    async with launcher.answering():
        terminal.start(launcher)
        await terminal.read_until(lambda: len(terminal.frames) >= 1)
        terminal.process.send_signal(number)
        await terminal.ends_with(code)


async def test_a_launcher_that_does_not_answer_is_reported_and_the_end_of_the_job_ends_it(
    launcher: Launcher, terminal: Terminal
) -> None:
    def newest_shows(what: str) -> bool:
        return bool(terminal.frames) and what in terminal.frames[-1][1]

    terminal.resize(100, 30)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(launcher.answering())
        terminal.start(launcher)
        await terminal.read_until(lambda: newest_shows("wait for rank 7"))
        await stack.aclose()
        await terminal.read_until(lambda: newest_shows("the launcher of the job at"))
        assert any("wait for rank 7" in line for line in terminal.frames[-1])
    async with launcher.answering():
        await terminal.read_until(lambda: newest_shows("wait for rank 7"))
    remove_job_directory(launcher.entry)
    await terminal.ends_with(0)
