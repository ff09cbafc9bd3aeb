"""Stacks that are read from the memory of a process: right, of one moment, and without any effect on it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncpar.core.observe.stack_dump import STACKS_FD, read_stack_dump
from asyncpar.launch.stack_files import StackFile, state_of
from asyncpar.observe.stack_views import ThreadView
from tests.soak import chosen, first

pytestmark = pytest.mark.process

HEAD = """
import ctypes, errno, os, sys, threading
from asyncpar.core.observe.stack_dump import open_stack_dump
open_stack_dump(os.environ)
"""

BUSY = """
def go_down(depth):
    return sum(range(3)) if depth == 0 else go_down(depth - 1)

inside = threading.Semaphore(0)

def stay_busy(is_main):
    inside.release()
    if is_main:
        inside.acquire()
        inside.acquire()
        print("ready", flush=True)
    while True:
        go_down(20)

threading.Thread(target=stay_busy, args=(False,), daemon=True).start()
stay_busy(True)
"""

IN_C = """
class Descriptor(ctypes.Structure):
    _fields_ = [("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short)]

def gräßlich_Ж():
    library = ctypes.PyDLL(None, use_errno=True)  # which keeps the interpreter lock
    waiting = Descriptor(0, 1, 0)
    print("ready", flush=True)
    result = library.poll(
        ctypes.byref(waiting), 1, 60000)  # the call
    print(result, errno.errorcode.get(ctypes.get_errno(), "well"), flush=True)

gräßlich_Ж()
"""

LIMIT = 60.0


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    number = os.open(tmp_path / "stacks", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    yield number
    os.close(number)


@contextmanager
def started(
    tmp_path: Path, program: str, descriptor: int, name: str = "program.py"
) -> Iterator[subprocess.Popen[bytes]]:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(HEAD + program)
    with subprocess.Popen(
        [sys.executable, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, STACKS_FD: str(descriptor)},
        pass_fds=[descriptor],
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


def until(look: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def line_of(mark: str) -> int:
    return next(n for n, line in enumerate((HEAD + IN_C).splitlines(), 1) if line.endswith(mark)) - 1


@pytest.mark.parametrize("name", first(1, ["plain.py", "prögram.py", "Ж/ü.py", "😀.py"]))
def test_a_call_of_c_with_the_interpreter_lock_is_found_and_not_interrupted(
    tmp_path: Path, descriptor: int, name: str
) -> None:
    """A signal would end ``poll`` with ``EINTR``, also where its handler restarts what can be restarted."""
    file = StackFile(descriptor)
    with started(tmp_path, IN_C, descriptor, name) as process:
        seen: list[tuple[ThreadView, ...]] = []

        def is_in_c() -> bool:
            seen.append(file.read())
            return bool(seen[-1]) and seen[-1][0].place == f"{Path(name).name}:{line_of('# the call')}"

        until(is_in_c)
        assert [file.read() == seen[-1] for _ in range(20)] == [True] * 20
        (main, *_) = seen[-1]
        assert [frame.function for frame in main.frames] == ["<module>", "gräßlich_Ж"]
        assert main.frames[0].line == len((HEAD + IN_C).splitlines())
        assert all(frame.is_user for frame in main.frames)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"go on\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"1 well\n"
        assert process.wait(LIMIT) == 0
    assert file.read() == ()
    assert read_stack_dump(descriptor) == ""


def test_threads_that_run_are_read_as_they_were_together_or_not_at_all(tmp_path: Path, descriptor: int) -> None:
    file = StackFile(descriptor)
    with started(tmp_path, BUSY, descriptor) as process:
        for _ in range(chosen(100, soak=300)):
            for thread in file.read():
                functions = [frame.function for frame in thread.frames if frame.is_user]
                assert functions in ([], *(["<module>", "stay_busy", *["go_down"] * depth] for depth in range(22))) or (
                    functions == ["stay_busy", *["go_down"] * (len(functions) - 1)]
                )
        assert process.poll() is None


def test_a_process_that_is_stopped_is_read_and_stays_stopped(tmp_path: Path, descriptor: int) -> None:
    file = StackFile(descriptor)
    with started(tmp_path, BUSY, descriptor) as process:
        process.send_signal(signal.SIGSTOP)
        until(lambda: state_of(process.pid) == "T")
        first = file.read()
        main, other = (thread for thread in first if any(frame.is_user for frame in thread.frames))
        assert main.is_main
        assert [frame.function for frame in main.frames][:2] == ["<module>", "stay_busy"]
        assert "stay_busy" in [frame.function for frame in other.frames]
        assert file.read() == first
        assert state_of(process.pid) == "T"


def test_a_process_that_never_described_how_it_is_read_is_left_alone(descriptor: int) -> None:
    file = StackFile(descriptor)
    assert file.read() == ()
    for content in (b"ready\n", b"ready [1,null]\n", b"ready [1,{}]\n", b'ready {"thread": 1}\n', b"\xff\xfe\n"):
        os.truncate(descriptor, 0)
        os.write(descriptor, content)
        assert file.read() == ()
