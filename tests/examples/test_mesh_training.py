"""The example of a mesh of actors, as its users run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak import first

SCRIPT = Path(__file__).parents[2] / "scripts" / "examples" / "mesh_training.py"
pytestmark = pytest.mark.process


@pytest.mark.parametrize("ranks", first(1, [2, 3, 4, 0]))
def test_trainers_on_any_number_of_ranks_find_the_weights(ranks: int) -> None:
    launch = ["-m", "asyncpar", "launch", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, "-W", "error", *launch, str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].endswith(f"{ranks or 1} trainers learned [1. 2. 3. 4. 5. 6. 7. 8.]")
    assert sum("loss" in line for line in lines) == 6
