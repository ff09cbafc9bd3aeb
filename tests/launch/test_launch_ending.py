"""`asyncpar launch` and signals: whatever ends it, no process stays."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launch.ways import changing_first, fixed_first
from tests.soak import chosen, first

pytestmark = pytest.mark.process
Launcher = Any  # the class lives in conftest.py
Eventually = Callable[[Callable[[], bool]], None]

PARKED = """
    child = subprocess.Popen(["sleep", "1000"])
    register(child.pid)
    register()
    park()
"""
STUBBORN = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    register()
    while True:
        park()
"""


def start_parked(
    launcher: Launcher, eventually: Eventually, *options: str, body: str = PARKED, count: int = 4
) -> subprocess.Popen[str]:
    process: subprocess.Popen[str] = launcher.start("--nproc-per-node", "2", *options, launcher.script(body))
    eventually(lambda: len(launcher.registered()) == count)
    return process


@pytest.mark.parametrize(
    ("number", "code"),
    chosen([(signal.SIGHUP, 129)], soak=[(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]),
)
def test_a_signal_ends_all_ranks_and_gives_the_shells_code(
    launcher: Launcher, eventually: Eventually, number: int, code: int
) -> None:
    process = start_parked(launcher, eventually)
    process.send_signal(number)
    done = launcher.finish(process)
    assert done.returncode == code
    assert f"ended by {signal.Signals(number).name}" in done.stderr
    assert launcher.ranks_alive() == []


def test_ranks_may_end_in_their_own_way(launcher: Launcher, eventually: Eventually) -> None:
    body = """
        def save(number, frame):
            print("saved")
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        register()
        park()
    """
    process = start_parked(launcher, eventually, body=body, count=2)
    process.send_signal(signal.SIGTERM)
    done = launcher.finish(process)
    assert done.returncode == 143
    assert done.stdout == "saved\n"


@fixed_first
def test_ranks_that_do_not_end_are_killed_after_the_grace_period(
    launcher: Launcher, eventually: Eventually, hosts: tuple[str, ...]
) -> None:
    process = start_parked(launcher, eventually, *hosts, "--grace-period", "0.3", body=STUBBORN, count=2)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    done = launcher.finish(process)
    assert time.monotonic() - began >= 0.3
    assert done.returncode == 130
    assert "killing them" in done.stderr
    assert launcher.ranks_alive() == []


def maps(process: subprocess.Popen[str], library: str) -> bool:
    return library in Path(f"/proc/{process.pid}/maps").read_text()


def names_below(process: subprocess.Popen[str]) -> list[str]:
    try:
        return [child.name() for child in psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


PHASES: dict[str, Callable[[subprocess.Popen[str]], bool]] = {
    "the first modules are loaded": lambda process: maps(process, "google/_upb"),
    "modules are loaded": lambda process: maps(process, "cygrpc"),
    "the last modules are loaded": lambda process: maps(process, "uvloop"),
    "the agent begins": lambda process: bool(names_below(process)),
    "the rank runs": lambda process: "sleep" in names_below(process),
}


@pytest.mark.parametrize("phase", first(2, PHASES))
def test_ctrl_c_gives_130_in_every_phase(launcher: Launcher, eventually: Eventually, phase: str) -> None:
    """From our first line on: what comes before is Python's own start."""
    process = launcher.start("--no-python", "--nproc-per-node", "1", "sleep", "1000")
    eventually(lambda: PHASES[phase](process))
    process.send_signal(signal.SIGINT)
    done = launcher.finish(process)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr


@changing_first
def test_a_second_ctrl_c_kills_at_once(launcher: Launcher, eventually: Eventually, hosts: tuple[str, ...]) -> None:
    process = start_parked(launcher, eventually, *hosts, "--grace-period", "1000", body=STUBBORN, count=2)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "Ctrl-C again" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert launcher.ranks_alive() == []


@pytest.mark.soak
def test_a_failing_rank_ends_stubborn_ones_too(launcher: Launcher) -> None:
    script = launcher.script("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        register()
        if rank == 1:
            while len(os.listdir(sys.argv[1])) < 2:
                time.sleep(0.01)
            sys.exit(6)
        while True:
            park()
    """)
    done = launcher.run("--nproc-per-node", "2", "--grace-period", "0.2", script, str(launcher.pids_directory))
    assert done.returncode == 6
    assert launcher.ranks_alive() == []


@pytest.mark.soak
def test_a_killed_rank_ends_the_job(launcher: Launcher, eventually: Eventually) -> None:
    body = """
        register()
        park()
    """
    process = start_parked(launcher, eventually, body=body, count=2)
    os.kill(launcher.registered()[0], signal.SIGKILL)
    done = launcher.finish(process)
    assert done.returncode == 137
    assert "failed first: was killed by SIGKILL" in done.stderr
    assert launcher.ranks_alive() == []


def test_a_killed_launcher_leaves_nothing_behind(launcher: Launcher, eventually: Eventually) -> None:
    body = """
        register()
        child = subprocess.Popen(["sh", "-c", "trap '' TERM HUP; sleep 1000 & wait"])
        register(child.pid)
        open(f"{os.path.dirname(sys.argv[0])}/secret{rank}", "w").write(os.environ["ASYNCPAR_SECRET_FILE"])
        park()
    """
    process = start_parked(launcher, eventually, body=body)
    eventually(lambda: all((launcher.directory / f"secret{rank}").exists() for rank in range(2)))
    secret = (launcher.directory / "secret0").read_text()
    process.kill()
    process.wait()
    eventually(lambda: launcher.ranks_alive() == [])
    eventually(lambda: not os.path.exists(os.path.dirname(secret)))


def test_a_killed_launcher_leaves_nothing_even_in_the_middle_of_starting(
    launcher: Launcher, eventually: Eventually
) -> None:
    process = launcher.start("--nproc-per-node", "8", launcher.script(PARKED))
    eventually(lambda: len(launcher.registered()) >= 1)
    process.kill()
    process.wait()
    eventually(lambda: launcher.ranks_alive() == [])


@fixed_first
def test_a_reader_that_does_not_read_cannot_keep_the_launcher(
    launcher: Launcher, eventually: Eventually, hosts: tuple[str, ...]
) -> None:
    """Our stdout is full: the ranks block, and so must not the launcher."""
    body = """
        register()
        while True:
            print("x" * 1000)
    """
    process = start_parked(launcher, eventually, *hosts, "--grace-period", "0.5", body=body, count=2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    assert launcher.ranks_alive() == []
