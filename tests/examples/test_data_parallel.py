"""The example of data parallel training, as its users run it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak import first

SCRIPT = Path(__file__).parents[2] / "scripts" / "examples" / "data_parallel.py"
pytestmark = pytest.mark.process


@pytest.mark.parametrize(("ranks", "staleness"), first(1, [(2, 2), (3, 2), (2, 0), (0, 0)]))
def test_ranks_with_uneven_inputs_learn_the_same(ranks: int, staleness: int) -> None:
    launch = ["-m", "asyncpar", "launch", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, "-W", "error", *launch, str(SCRIPT), "--staleness", str(staleness)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    epochs = [re.findall(r"(\d+) batches: ([0-9.]+)", line) for line in done.stdout.splitlines()]
    assert [len(epoch) for epoch in epochs] == [ranks or 1] * 4
    for epoch in epochs:
        assert [int(batches) for batches, _ in epoch] == [40, 30, 20][: len(epoch)]
        assert len({loss for _, loss in epoch}) == 1
    assert float(epochs[-1][0][1]) < 0.5 * float(epochs[0][0][1])
