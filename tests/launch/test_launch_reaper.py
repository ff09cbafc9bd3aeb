"""A reaper that is killed is replaced, and knows all that the one before it knew."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncpar.launch.reaper_client import ReaperClient

pytestmark = pytest.mark.process
Launcher = Any  # the class lives in conftest.py
Eventually = Callable[[Callable[[], bool]], None]


def reaper_of(process: subprocess.Popen[str]) -> psutil.Process | None:
    for child in psutil.Process(process.pid).children():
        if any(argument.endswith("reaper.py") for argument in child.cmdline()):
            return child
    return None


def kill(reaper: ReaperClient) -> None:
    process = reaper._process  # noqa: SLF001  # only its parent can wait for its end, and the client keeps the handle
    process.kill()
    process.wait()


def test_a_killed_reaper_is_replaced_and_the_next_one_cleans_up(launcher: Launcher, eventually: Eventually) -> None:
    body = """
        child = subprocess.Popen(["sh", "-c", "trap '' TERM HUP; sleep 1000 & wait"])
        register(child.pid)
        register()
        park()
    """
    process = launcher.start("--nproc-per-node", "2", launcher.script(body))
    eventually(lambda: len(launcher.registered()) == 4)
    first = reaper_of(process)
    assert first is not None
    first.kill()
    assert process.stderr is not None
    assert "the reaper was killed; there is another one now" in process.stderr.readline()
    eventually(lambda: reaper_of(process) is not None)  # a process has no command line for a moment while it starts
    second = reaper_of(process)
    assert second is not None
    assert second.pid != first.pid
    process.kill()
    process.wait()
    eventually(lambda: launcher.ranks_alive() == [])


@pytest.mark.soak
def test_what_was_registered_before_and_after_the_kill_is_cleaned_up(tmp_path: Path) -> None:
    reaper = ReaperClient()
    before, after = tmp_path / "before", tmp_path / "after"
    for path in (before, after):
        path.touch()
    sleeper = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    reaper.add_path(before)
    reaper.add_group(sleeper.pid)
    killed = reaper.pid
    kill(reaper)
    reaper.add_path(after)
    assert reaper.pid != killed
    reaper.close()
    assert sleeper.wait(60) == -9
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
def test_a_reaper_that_was_killed_last_of_all_is_replaced_for_the_cleaning(tmp_path: Path) -> None:
    reaper = ReaperClient()
    path = tmp_path / "left"
    path.touch()
    reaper.add_path(path)
    kill(reaper)
    reaper.close()
    assert list(tmp_path.iterdir()) == []
