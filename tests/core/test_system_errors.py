"""Errors of the system in words, and where a limit is reached, the limit."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import subprocess
import sys

import numpy as np
import pytest

from asyncpar.core.system_errors import note_limit, os_reason
from asyncpar.testing.world import local_world
from tests.soak import first

PROGRAM = "import asyncpar as ap\nasync def main():\n    async with ap.init(): pass\nap.run(main)\n"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOENT, "No such file or directory"), "No such file or directory"),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files; raise this process's limit: ulimit -n"),
        (OSError(errno.ENFILE, "Full"), "Full; raise the system's limit: sysctl fs.file-max"),
        (OSError("no number"), "no number"),
        (OSError(), "OSError"),
        (ValueError("x"), "x"),
    ],
)
def test_reasons_say_which_limit_to_raise(error: Exception, reason: str) -> None:
    assert os_reason(error) == reason


def test_the_note_is_added_once() -> None:
    error = OSError(errno.EMFILE, "Too many open files")
    note_limit(error)
    note_limit(error)
    assert error.__notes__ == ["raise this process's limit: ulimit -n"]


def _limited(files: int, *command: str) -> list[str]:
    """Return what runs the command with so few descriptors."""
    return ["sh", "-c", f'ulimit -n {files} && exec "$@"', "sh", *command]


@pytest.mark.process
@pytest.mark.parametrize("files", first(1, [30, 20]))
def test_a_launch_without_descriptors_names_the_limit(files: int) -> None:
    done = subprocess.run(
        _limited(files, sys.executable, "-m", "asyncpar", "launch", "--no-python", "--nproc-per-node", "2", "true"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "ulimit -n" in done.stderr


@pytest.mark.process
def test_a_program_without_descriptors_names_the_limit() -> None:
    done = subprocess.run(
        _limited(8, sys.executable, "-c", PROGRAM),
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "ulimit -n" in done.stderr


async def test_the_log_names_the_ranks_that_have_joined_and_their_lanes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "asyncpar")
    async with local_world(2, transport="tcp") as (first, second):
        one, other = np.ones(4), np.ones(4)
        reduced = second.world.all_reduce(other)
        await asyncio.gather(first.world.all_reduce(one), reduced)
    texts = [record.getMessage() for record in caplog.records]
    assert "rank 0 of 2 joined the world, generation 0" in texts
    assert any(text.startswith("rank 0 has a tcp lane to rank 1 on ") for text in texts), texts


@pytest.mark.process
def test_ranks_log_their_shared_memory() -> None:
    program = "import logging\nlogging.basicConfig(level=logging.INFO)\n" + PROGRAM
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "asyncpar",
            "launch",
            "--no-python",
            "--nproc-per-node",
            "2",
            sys.executable,
            "-c",
            program,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    output = done.stdout + done.stderr
    assert "rank 1 of 2 joined the world, generation 0" in output
    assert output.count(": 2 ranks share memory, arena=") == 1
