"""Stacks that a process writes when it is asked by signals."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncpar.core.observe.stack_dump import STACK_SIGNAL, STACKS_FD, is_ready
from asyncpar.launch.stack_files import StackFile
from asyncpar.observe.stack_views import ThreadView, parse_dump

pytestmark = pytest.mark.process

BUSY = """
import os, threading
from asyncpar.core.observe.stack_dump import open_stack_dump
open_stack_dump(os.environ)

def go_down(depth):
    return sum(range(3)) if depth == 0 else go_down(depth - 1)

def stay_busy():
    while True:
        go_down(20)

def main_work():
    print("ready", flush=True)
    while True:
        go_down(20)

for _ in range(2):
    threading.Thread(target=stay_busy, daemon=True).start()
main_work()
"""


IN_C = """
import ctypes, os
from asyncpar.core.observe.stack_dump import open_stack_dump
open_stack_dump(os.environ)

def stay_in_c():
    print("ready", flush=True)
    ctypes.PyDLL(None).sleep(3)  # or less: the signal ends it

stay_in_c()
"""


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    number = os.open(tmp_path / "stacks", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    yield number
    os.close(number)


class _OldLibrary:
    """A C library without a way to signal one thread."""


@pytest.mark.parametrize("has_tgkill", [True, False])
def test_threads_that_run_python_code_write_their_own_stacks_and_go_on(
    descriptor: int, monkeypatch: pytest.MonkeyPatch, *, has_tgkill: bool
) -> None:
    """One that writes the stacks of others while these run crashes now and then."""
    if not has_tgkill:
        monkeypatch.setattr(ctypes, "CDLL", lambda _: _OldLibrary())
    with subprocess.Popen(
        [sys.executable, "-c", BUSY],
        stdout=subprocess.PIPE,
        env={**os.environ, STACKS_FD: str(descriptor)},
        pass_fds=[descriptor],
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            stacks = StackFile(descriptor)
            answers: list[tuple[ThreadView, ...]] = []
            others: set[str] = set()
            until = time.monotonic() + 40.0  # a busy machine may leave a thread no time to write in
            while len(answers) < 12 or (has_tgkill and "stay_busy" not in others and time.monotonic() < until):
                if threads := parse_dump(asyncio.run(stacks.ask(process.pid)))[1]:
                    answers.append(threads)
                    others |= {frame.function for thread in threads[1:] for frame in thread.frames}
                assert answers or time.monotonic() < until
            assert process.poll() is None
        finally:
            process.kill()
    for main, *_ in answers:
        assert main.is_main
        assert main.frames[0].function == "<module>"
        assert "main_work" in [frame.function for frame in main.frames]
    assert ("stay_busy" in others) is has_tgkill


def test_a_process_that_the_signal_ends_has_written_its_stack_before_the_file_is_closed(descriptor: int) -> None:
    """As a launcher closes it when a rank has ended: a call of C may end by the signal, and the program with it."""
    own = os.dup(descriptor)

    async def ask(pid: int) -> str:
        stacks = StackFile(own)
        asking = asyncio.ensure_future(stacks.ask(pid))
        await asyncio.sleep(0)
        stacks.close()
        return await asking

    with subprocess.Popen(
        [sys.executable, "-c", IN_C],
        stdout=subprocess.PIPE,
        env={**os.environ, STACKS_FD: str(descriptor)},
        pass_fds=[descriptor],
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            text = asyncio.run(ask(process.pid))
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()
    assert "in stay_in_c" in text
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(own)


AT_ITS_END = """
import ctypes, os, sys
from asyncpar.core.observe.stack_dump import open_stack_dump
open_stack_dump(os.environ)
library = ctypes.CDLL(None)
# C runs this when the interpreter has ended, and with it the handler.
library["__cxa_atexit"](ctypes.cast(library.getchar, ctypes.c_void_p), None, None)
print("ready", flush=True)
"""


def test_a_process_that_is_asked_while_it_ends_is_not_killed(descriptor: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", AT_ITS_END],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, STACKS_FD: str(descriptor)},
        pass_fds=[descriptor],
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            until = time.monotonic() + 30.0
            while is_ready(descriptor, process.pid):
                assert time.monotonic() < until
                time.sleep(0.005)
            assert process.poll() is None
            process.send_signal(STACK_SIGNAL)
            process.communicate(b"\n", timeout=30)
            assert process.returncode == 0
        finally:
            process.kill()


def test_a_process_that_never_said_that_it_is_ready_is_left_alone(descriptor: int) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert asyncio.run(StackFile(descriptor).ask(process.pid)) == ""
        assert process.stdin is not None
        process.stdin.close()
    assert process.returncode == 1
