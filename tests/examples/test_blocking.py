"""The example of a program without an event loop."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak import first

EXAMPLE = Path(__file__).resolve().parents[2] / "scripts" / "examples" / "blocking.py"


@pytest.mark.process
@pytest.mark.parametrize(("ranks", "line"), first(1, [(2, "0 3.0 (2, 2) 3"), (1, "0 1.0 (1, 2) 3")]))
def test_the_example_of_blocking_code_runs(ranks: int, line: str) -> None:
    launch = ["-m", "asyncpar", "launch", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = subprocess.run([sys.executable, *launch, str(EXAMPLE)], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == [line]
