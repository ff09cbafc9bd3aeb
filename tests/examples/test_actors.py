"""The example of actors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.programs import shows
from tests.soak import first

EXAMPLE = Path(__file__).resolve().parents[2] / "scripts" / "examples" / "actors.py"
LINES = ["{rank} 24.0 3.0 1.0", "{rank} failed", "{rank} back with 1.0"]


def test_the_documentation_shows_the_example() -> None:
    program = EXAMPLE.read_text().split("\n\n", 1)[1]
    assert shows("docs/actors.md", program)


@pytest.mark.process
@pytest.mark.parametrize("ranks", first(1, [2, 1]))
def test_the_example_of_actors_runs(ranks: int) -> None:
    launch = ["-m", "asyncpar", "launch", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = subprocess.run([sys.executable, *launch, str(EXAMPLE)], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == [line.format(rank=0) for line in LINES]
    assert done.stderr.count("RuntimeError: a cable came off") >= ranks
