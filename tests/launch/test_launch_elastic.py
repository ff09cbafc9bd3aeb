"""Launchers that come and go while a job runs: real agents on loopback."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from tests.ports import free_port

pytestmark = pytest.mark.process
Launcher = Any  # the class lives in conftest.py
Eventually = Callable[[Callable[[], bool]], None]

UNTIL_FILE = """
    world = f"{os.environ['ASYNCPAR_GENERATION']}-{rank}-{os.environ['WORLD_SIZE']}"
    open(f"world-{world}", "w").close()
    register()
    while not os.path.exists("end"):
        time.sleep(0.02)
"""


class Job:
    """A job of ``nnodes`` hosts whose ranks write down their worlds, and end once there is a file ``end``."""

    def __init__(self, launcher: Launcher, eventually: Eventually, nnodes: str, *options: str) -> None:
        self.launcher, self.eventually = launcher, eventually
        script = launcher.script(UNTIL_FILE)
        endpoint = f"127.0.0.1:{free_port()}"
        common = ("--nnodes", nnodes, "--rdzv-endpoint", endpoint, "--rdzv-timeout", "25", "--last-call", "0.3")
        self.common: tuple[str, ...] = (*common, *options, script)

    def start(self, place: int) -> subprocess.Popen[str]:
        process: subprocess.Popen[str] = self.launcher.start("--node-rank", str(place), *self.common)
        return process

    def await_world(self, generation: int, size: int) -> None:
        directory = self.launcher.directory
        paths = [directory / f"world-{generation}-{rank}-{size}" for rank in range(size)]
        self.eventually(lambda: all(path.exists() for path in paths))

    def end(self, *processes: subprocess.Popen[str]) -> list[subprocess.CompletedProcess[str]]:
        (self.launcher.directory / "end").touch()
        return [self.launcher.finish(process) for process in processes]


def test_a_job_starts_small_grows_and_goes_on_without_a_killed_host(launcher: Launcher, eventually: Eventually) -> None:
    job = Job(launcher, eventually, "1:3", "--reconnect-within", "0.2")
    first = job.start(0)
    job.await_world(0, 1)
    second = job.start(1)
    job.await_world(1, 2)
    third = job.start(2)
    job.await_world(2, 3)
    second.kill()
    second.communicate()
    job.await_world(3, 2)
    replacement = job.start(1)
    job.await_world(4, 3)
    ends = job.end(first, third, replacement)
    assert [end.returncode for end in ends] == [0, 0, 0], ends
    said = ends[0].stderr
    assert said.count("a host joins or leaves; stopping all ranks") == 3
    assert "was lost with its host (" in said
    assert said.count("starting all ranks again on 3 hosts\n") == 2
    assert launcher.ranks_alive() == []


def test_a_job_goes_on_without_its_first_launcher(launcher: Launcher, eventually: Eventually) -> None:
    job = Job(launcher, eventually, "1:3")
    job.common = ("--last-call", "30", *(word for word in job.common if word not in ("--last-call", "0.3")))
    launchers = [job.start(place) for place in range(3)]
    job.await_world(0, 3)
    launchers[0].kill()
    launchers[0].communicate()
    job.await_world(1, 2)
    ends = job.end(*launchers[1:])
    assert [end.returncode for end in ends] == [0, 0], ends
    assert launcher.ranks_alive() == []


@pytest.mark.soak
def test_a_host_that_gets_sigterm_leaves_and_the_others_go_on(launcher: Launcher, eventually: Eventually) -> None:
    job = Job(launcher, eventually, "1:2")
    first = job.start(0)
    job.await_world(0, 1)
    second = job.start(1)
    job.await_world(1, 2)
    second.send_signal(signal.SIGTERM)
    assert launcher.finish(second).returncode == 143
    job.await_world(2, 1)
    [end] = job.end(first)
    assert end.returncode == 0, end


@pytest.mark.soak
def test_a_crash_counts_as_a_restart_on_all_hosts(launcher: Launcher, eventually: Eventually) -> None:
    job = Job(launcher, eventually, "1:2")
    script = launcher.script("sys.exit(3 if rank == 1 else signal.pause())", name="crash.py")
    job.common = (*job.common[:-1], "--max-restarts", "1", script)
    ends = [launcher.finish(process) for process in [job.start(0), job.start(1)]]
    assert [end.returncode for end in ends] == [3, 3], ends
    assert [end.stderr.count("starting all ranks again (restart 1)") for end in ends] == [1, 1]
