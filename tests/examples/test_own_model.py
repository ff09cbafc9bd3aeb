"""The example of a model of one's own, as its users run it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.programs import shows
from tests.soak import first

EXAMPLE = Path(__file__).parents[2] / "scripts" / "examples" / "own_model.py"


def test_the_example_is_short_and_on_its_page() -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) < 60
    program = text.split("\n\n", 2)[2]
    assert shows("docs/training.md", program)


@pytest.mark.process
@pytest.mark.parametrize("ranks", first(1, [2, 1]))
def test_the_model_learns(ranks: int) -> None:
    launch = ["-m", "asyncpar", "launch", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, "-W", "error", *launch, str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", done.stdout)]
    assert len(losses) == 4
    assert losses[-1] < 0.75 * losses[0]
