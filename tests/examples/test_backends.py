"""The example of backends, as its users run it; over MPI it is tested with the backends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak import first

SCRIPT = Path(__file__).parents[2] / "scripts" / "examples" / "backends.py"
pytestmark = pytest.mark.process


@pytest.mark.parametrize("ranks", first(1, [2, 3, 0]))
def test_all_ranks_hold_the_mean(ranks: int) -> None:
    launch = ["-m", "asyncpar", "launch", "--nproc-per-node", str(ranks)] if ranks else []
    done = subprocess.run(
        [sys.executable, *launch, str(SCRIPT)], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    mean = max(0, ranks - 1) / 2
    said = f"of {ranks or 1}: the mean is {mean:.4f}"
    assert (done.stdout + done.stderr).count(said) == (ranks or 1)
