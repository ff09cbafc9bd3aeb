"""One rank's process, signalled before it is anything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncpar.errors import LaunchError
from asyncpar.launch.rank_process import ChildStreams, RankProcess
from asyncpar.launch.reaper_client import ReaperClient

pytestmark = pytest.mark.process


@pytest.fixture
def reaper() -> Iterator[ReaperClient]:
    instance = ReaperClient()
    yield instance
    instance.close()


def start(reaper: ReaperClient, program: str) -> tuple[RankProcess, int]:
    """Start the trampoline for a Python program; returns the read end of its output, too."""
    read_end, write_end = os.pipe()
    streams = ChildStreams(
        stdin=subprocess.DEVNULL, stdout=write_end, stderr=write_end, report=write_end, notices=write_end
    )
    process = RankProcess.start((sys.executable, "-c", program), os.environ, streams, reaper)
    os.close(write_end)
    return process, read_end


def signals(pid: int, field: str) -> int:
    """Return a set of signals from ``/proc/PID/status``."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")), 16)


def is_caught_as_python_starts(pid: int) -> bool:
    """Wait until Python has a handler of its own for SIGINT; False if it is told to have none before we look."""
    interrupt = 1 << (signal.SIGINT - 1)
    while signals(pid, "SigBlk") & interrupt:
        if signals(pid, "SigCgt") & interrupt:
            return True
    return False


async def test_ctrl_c_while_the_trampoline_starts_is_silent(reaper: ReaperClient) -> None:
    """It is a Python program that takes milliseconds to start; its traceback would tell nobody anything."""
    in_time = 0
    for _ in range(50):
        process, output = start(reaper, "print('ran')")
        in_time += is_caught_as_python_starts(process.pid)
        process.signal(signal.SIGINT)
        process.go()
        assert await process.wait() == -signal.SIGINT
        assert os.read(output, 1000) == b""
        os.close(output)
        await process.clear(grace=0.0)
        if in_time:
            break
    assert in_time


async def test_the_program_gets_its_signals(reaper: ReaperClient) -> None:
    process, output = start(reaper, "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))")
    process.go()
    assert await process.wait() == 0
    assert os.read(output, 1000) == b"set()\n"
    os.close(output)
    await process.clear(grace=0.0)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


async def test_the_program_inherits_only_the_descriptors_that_are_meant_for_it(reaper: ReaperClient) -> None:
    process, output = start(reaper, "import os; print(sorted(os.listdir('/proc/self/fd'), key=int))")
    process.go()
    assert await process.wait() == 0
    descriptors = os.read(output, 1000)
    os.close(output)
    await process.clear(grace=0.0)
    assert descriptors.count(b"'") // 2 == 3 + 1 + 1  # the standard streams, the report pipe, and that of listdir


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


class NoReaper(ReaperClient):
    """One that is gone and cannot be replaced."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def add_group(self, group: int) -> None:
        self.asked.append(group)
        raise LaunchError("the reaper is gone")


def test_a_start_that_fails_leaves_no_process_and_no_descriptor() -> None:
    streams = ChildStreams(
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, report=1, notices=2
    )
    before = open_descriptors()
    reaper = NoReaper()
    with pytest.raises(LaunchError, match="the reaper is gone"):
        RankProcess.start((sys.executable, "-c", ""), os.environ, streams, reaper)
    assert not Path(f"/proc/{reaper.asked[0]}").exists()
    with pytest.raises(OSError, match="Argument list too long"):
        RankProcess.start((sys.executable, "-c", "x" * (1 << 24)), os.environ, streams, reaper)
    assert open_descriptors() == before
