"""Blocking programs as processes: how they end, and what their launcher receives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process
LIMIT = 50.0
"""Seconds after which a program hangs."""


HEAD = """
import multiprocessing, os, sys, threading, warnings
import numpy as np
import asyncpar.blocking as ab
from asyncpar.errors import AsyncparError, UsageError

def say(*words):
    os.write(1, ("printed: " + " ".join(map(str, words)) + "\\n").encode())
"""


def printed(output: str) -> list[str]:
    """Return lines that the ranks printed, in no order."""
    return sorted(line.split("printed: ")[1] for line in output.splitlines() if "printed: " in line)


def noise(output: str) -> list[str]:
    """Return all other lines; the launcher shows what ranks other than 0 say as it shows complaints."""
    return [line for line in output.splitlines() if "printed: " not in line]


def start(tmp_path: Path, body: str, *, ranks: int = 1) -> subprocess.Popen[str]:
    program = tmp_path / "program.py"
    program.write_text(HEAD + body)
    launch = ["-m", "asyncpar", "launch", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return subprocess.Popen(
        [sys.executable, "-W", "error", *launch, str(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Return exit code, output and complaints of a program that ends by itself, soon."""
    try:
        shown, complaints = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, shown, complaints


def test_ranks_that_end_without_closing_leave_in_good_order(tmp_path: Path) -> None:
    """Also with threads that still wait for something that never comes."""
    body = """
import atexit, time

def is_quick():
    assert time.monotonic() - ended < 4.0, "leaving took too long"

atexit.register(is_quick)
node = ab.Node.start()
comm = node.world
say(node.rank, comm.all_reduce(np.ones(4))[0])
sent = comm.start.send(np.ones(1), 1 - node.rank)
comm.recv(1 - node.rank)  # so they are connected: who is when the other ends may not be able to any more, and says so
sent.wait()

def wait():
    try:
        comm.recv(1 - node.rank)
    except AsyncparError:
        pass

threading.Thread(target=wait, daemon=True).start()
pending = comm.start.recv(1 - node.rank, tag=1)
comm.barrier()
ended = time.monotonic()
"""
    code, shown, complaints = finish(start(tmp_path, body, ranks=2))
    assert (code, printed(shown + complaints), noise(complaints)) == (0, ["0 2.0", "1 2.0"], [])


@pytest.mark.soak
def test_the_launcher_names_the_rank_that_failed_and_why(tmp_path: Path) -> None:
    body = """
with ab.init() as node:
    node.world.barrier()
    if node.rank == 1:
        raise ValueError("out of paper")
    node.world.barrier()
"""
    code, _, complaints = finish(start(tmp_path, body, ranks=2))
    assert code == 1
    assert "rank 1 failed first: ValueError: out of paper" in complaints
    assert "PeerLost: rank 0: barrier #2: rank 1 on" in complaints  # of the other rank, whenever it was notified


@pytest.mark.parametrize(
    ("number", "code", "is_silent"), [(signal.SIGTERM, 143, True), (signal.SIGINT, -signal.SIGINT, False)]
)
def test_signals_end_a_program_in_good_order(
    tmp_path: Path, number: signal.Signals, code: int, is_silent: bool
) -> None:
    body = """
with ab.init() as node:
    pending = node.begin(lambda: __import__("asyncio").sleep(1000))
    try:
        say("ready")
        pending.wait()
    finally:
        say("left", node.world.all_reduce(np.ones(1))[0])
"""
    process = start(tmp_path, body)
    assert process.stdout is not None
    assert printed(process.stdout.readline()) == ["ready"]
    process.send_signal(number)
    status, shown, complaints = finish(process)
    assert (status, printed(shown)) == (code, ["left 1.0"])
    assert (complaints == "") is is_silent


def test_forks_are_reported_and_disturb_nobody(tmp_path: Path) -> None:
    """One that uses the node, ones that do not and exit in several ways, and those of multiprocessing."""
    body = """
warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)  # of Python 3.12 and later

def work(number):
    return number * 2
if __name__ == "__main__":
    with ab.init() as node:
        comm = node.world
        comm.all_reduce(np.ones(1 << 16))
        codes = []
        for kind in ("use", "exit", "os._exit", "fall through the block"):
            child = os.fork()
            if child == 0:
                if kind == "use":
                    for attempt in (comm.barrier, lambda: comm.start.barrier(), ab.Node.start, lambda: node.call(int)):
                        try:
                            attempt()
                        except UsageError as error:
                            assert "this process is a fork" in str(error), error
                        else:
                            os._exit(3)
                    os._exit(0)
                if kind == "exit":
                    sys.exit(0)
                if kind == "os._exit":
                    os._exit(0)
                break
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        else:
            with multiprocessing.get_context("fork").Pool(2) as pool:
                doubled = pool.map(work, range(4))
            say(codes, doubled, comm.all_reduce(np.ones(2))[0])
"""
    code, shown, complaints = finish(start(tmp_path, body, ranks=2))
    assert (code, noise(complaints)) == (0, [])
    assert printed(shown + complaints) == ["[0, 0, 0, 0] [0, 2, 4, 6] 2.0"] * 2


@pytest.mark.soak
def test_ctrl_c_ends_a_launched_program_without_noise(tmp_path: Path) -> None:
    body = """
with ab.init() as node:
    node.world.barrier()
    say("ready")
    node.world.recv(1 - node.rank)
"""
    process = start(tmp_path, body, ranks=2)
    assert process.stdout is not None
    assert printed(process.stdout.readline()) == ["ready"]
    process.send_signal(signal.SIGINT)
    code, _, complaints = finish(process)
    assert code == 130
    assert "Traceback" not in complaints


def test_a_fork_ends_on_sigterm_whatever_it_is_doing(tmp_path: Path) -> None:
    """Python forgets exceptions of its own hooks after a fork; a pool would wait for such a child for ever."""
    body = """
import signal

def end_early():
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(10):
        pass  # Python looks for signals here

os.register_at_fork(after_in_child=end_early)
with ab.init() as node:
    child = os.fork()
    if child == 0:
        os._exit(5)
    say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    code, shown, complaints = finish(start(tmp_path, body, ranks=1))
    assert (code, printed(shown + complaints)) == (0, ["-15"])  # gRPC may say that it skips its own hooks


def test_what_is_forked_during_a_visit_ends_on_signals(tmp_path: Path) -> None:
    """The main thread handles signals in its own way for the time of a visit, in which others may fork."""
    body = """
import signal

def fork():
    child = os.fork()
    if child == 0:
        say(*(signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)))
        os.kill(os.getpid(), signal.SIGTERM)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

def visit():
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()

codes = []
with ab.init() as node:
    node.call(visit)
    fork()
    say(codes)
"""
    code, shown, complaints = finish(start(tmp_path, body, ranks=1))
    assert code == 0
    assert printed(shown + complaints) == [f"{signal.SIG_DFL!s} {signal.default_int_handler}"] * 2 + ["[-15, -15]"]
