"""Processes that a test starts are gone when the tests have ended, however they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from tests.soak import chosen, first

ROOT = Path(__file__).parents[1]
PATIENCE = 60.0

SESSION = """
import os, signal, subprocess, sys, time
from pathlib import Path

def start(name, *command):
    # in a session of its own, out of reach of signals for the group of pytest
    process = subprocess.Popen(command, start_new_session=True)
    Path(f"new-{name}").write_text(str(process.pid))
    os.rename(f"new-{name}", f"pid-{name}")

def start_all():
    asyncpar = (sys.executable, "-m", "asyncpar")
    start("agent", *asyncpar, "agent", "--listen", f"127.0.0.1:{os.environ['AGENT_PORT']}", "--state-dir", "votes")
    start("launcher", *asyncpar, "launch", "--nproc-per-node", "2", "rank.py")
    start("orphan", "sh", "-c", "sleep 600 & echo $! > new-child; mv new-child pid-child")

def test_that_passes():
    start_all()
    while len(list(Path().glob("pid-*"))) < 6:
        time.sleep(0.05)

def test_that_hangs():
    start_all()
    time.sleep(600)
"""
RANK = """
import os, time
open(f"new-rank{os.environ['RANK']}", "w").write(str(os.getpid()))
os.rename(f"new-rank{os.environ['RANK']}", f"pid-rank{os.environ['RANK']}")
time.sleep(600)
"""

MORE = [("pass", "1"), ("SIGINT", "0"), *((end, workers) for end in ("SIGTERM", "SIGKILL") for workers in "01")]
"""Further ends of a session, and its numbers of workers."""


def wait_for(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_there(pid: int) -> bool:
    return psutil.pid_exists(pid) and is_running(psutil.Process(pid))


@pytest.mark.process
@pytest.mark.parametrize(("end", "workers"), first(2, [("pass", "0"), ("SIGINT", "1"), *MORE]))
def test_nothing_that_a_test_starts_outlives_it(end: str, workers: str, tmp_path: Path) -> None:
    from tests.ports import free_port

    (tmp_path / "test_session.py").write_text(SESSION)
    (tmp_path / "rank.py").write_text(RANK)
    test = "test_that_passes" if end == "pass" else "test_that_hangs"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.leftovers", "-p", "no:cacheprovider"]
    session = subprocess.Popen(
        [*command, "-n", workers, "-c", os.devnull, "--rootdir", tmp_path, f"test_session.py::{test}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "AGENT_PORT": str(free_port())},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # so that Ctrl-C goes to it alone
    )
    with session:
        names = {"agent", "launcher", "child", "rank0", "rank1"}
        wait_for(lambda: {path.name.removeprefix("pid-") for path in tmp_path.glob("pid-*")} >= names, "a start")
        pids = {name: int((tmp_path / f"pid-{name}").read_text()) for name in names}
        if end == "SIGINT":
            os.killpg(session.pid, signal.SIGINT)  # as a terminal does
        elif end != "pass":
            session.send_signal(signal.Signals[end])
        output, _ = session.communicate(timeout=PATIENCE)

    for name, pid in pids.items():
        wait_for(lambda pid=pid: not is_there(pid), f"{name} is left after\n{output.decode()}")  # type: ignore[misc]
    if end == "pass":
        assert session.returncode == 0, output


LEAVING = """
import socket, subprocess, threading

def test_that_leaves():
    held.append([{left}])

held = []
"""
LEFT = {
    "socket": ("socket.create_server(('127.0.0.1', 0))", "socket 127.0.0.1:"),
    "thread": ("threading.Thread(target=threading.Event().wait, name='left', daemon=True).start()", "thread left"),
    "process": ("subprocess.Popen(['sleep', '600'])", "sleep 600"),
    "orphan": ("subprocess.run(['sh', '-c', 'sleep 600 >/dev/null 2>&1 &'])", "sleep 600"),
}
TOGETHER: Sequence[tuple[str, ...]] = chosen(
    [("socket", "thread", "process"), ("orphan",)], soak=[(name,) for name in LEFT]
)
"""What a session leaves: an orphan is found in another way than the others, which are found in one look."""


@pytest.mark.process
def test_what_a_test_leaves_fails_the_session(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests import belongings\n"
        "from tests.belongings import nothing_is_left, pytest_sessionfinish\n"
        "from tests.leftovers import pytest_configure, pytest_unconfigure\n"
        "belongings._PATIENCE = 0.2\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir"]
    sessions = {}
    for names in TOGETHER:
        file = f"test_{'_'.join(names)}.py"
        (tmp_path / file).write_text(LEAVING.format(left=", ".join(LEFT[name][0] for name in names)))
        sessions[names] = subprocess.Popen(
            [*command, tmp_path, file],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    outputs = {names: session.communicate(timeout=PATIENCE)[0].decode() for names, session in sessions.items()}
    for names, output in outputs.items():
        assert sessions[names].returncode == 1, output
        assert [name for name in names if LEFT[name][1] not in output] == [], output
