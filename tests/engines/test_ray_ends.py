"""Nothing of Ray, of our agents or of ranks is left of a program, however it ends; ``scripts/test-ray`` has ray."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("ray", reason="ray (extra ray) is not installed; scripts/test-ray has it")

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

PROGRAM = """
import sys
import ray
import asyncpar as ap
from asyncpar.testing import engine_programs as programs

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
folder, function = sys.argv[1], getattr(programs, sys.argv[2])
arguments = [folder] if function is programs.linger else [1]
ap.ray.run(function, *arguments, ranks=2, per_place=2, grace=2.0, resources={"CPU": 0.5})
"""
MARK = "ASYNCPAR_TEST_PROGRAM"


@pytest.mark.parametrize(
    ("function", "number", "code"),
    [("fail", None, 1), ("linger", signal.SIGINT, 1), ("linger", signal.SIGKILL, -signal.SIGKILL)],
)
def test_nothing_is_left_of_a_program_that_ends(
    tmp_path: Path, function: str, number: signal.Signals | None, code: int
) -> None:
    """Ray makes 1 of the exit code after Ctrl-C."""
    mark = secrets.token_hex(8)
    with (tmp_path / "log").open("wb") as log:
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path), function],
            env=os.environ | {MARK: mark},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + 120.0
    try:
        if number is not None:
            while sum(path.name.isdecimal() for path in tmp_path.iterdir()) < 2:
                assert program.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            program.send_signal(number)
        assert program.wait(timeout=60) == code, (tmp_path / "log").read_text()
        while left := find_marked(mark):
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
    finally:
        program.kill()
        program.wait()


def find_marked(mark: str) -> list[str]:
    """Return the processes that the program has started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {process.cmdline()[:3]}")
        except psutil.Error:  # it has ended meanwhile
            continue
    return found
