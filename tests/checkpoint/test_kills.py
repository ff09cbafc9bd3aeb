"""Real processes that are really killed while they save.

Three are; a hundred with ``--soak``.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asyncpar.checkpoint import latest
from asyncpar.testing.loop import run_virtual
from tests.checkpoint.layouts import Layout, small_model
from tests.checkpoint.worlds import load_and_check
from tests.soak import chosen

KILLS = chosen(2, soak=100)
ROOT = Path(__file__).parents[2]


@pytest.mark.process
@pytest.mark.timeout(30 + 5 * KILLS)
def test_a_kill_never_loses_a_checkpoint_that_was_complete(place: Path) -> None:
    """Each victim goes on where the last one was killed, and reports the steps that it has saved."""
    folder, complete = place / "checkpoints", -1
    for seed in range(KILLS):
        command = [sys.executable, "-W", "error", "-m", "tests.checkpoint.victim", str(folder), str(seed)]
        victim = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
        assert victim.returncode == -signal.SIGKILL
        complete = max([complete, *map(int, victim.stdout.split())])
        last = latest(folder)
        assert last is not None
        assert complete <= last.step <= complete + 1
        complete = last.step
        run_virtual(check_bits(folder, last.step))


async def check_bits(folder: Path, step: int) -> None:
    for layout in (Layout(), Layout(dp=2, zero=True)):
        await load_and_check(folder, small_model(seed=100 * step), layout)
