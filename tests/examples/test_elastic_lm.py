"""The elastic language model, as its users run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "examples" / "elastic_lm.py"
SMALL = ["--batch", "16", "--seq", "16", "--dim", "16", "--layers", "1", "--heads", "1"]
pytestmark = pytest.mark.process


@pytest.mark.timeout(150)
def test_a_rank_that_is_killed_and_replaced_changes_no_byte(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--kill", "--ranks", "2", "--steps", "120", *SMALL, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=140, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["same_bytes"] is True
    assert any("was killed by SIGKILL" in change for change in figures["changes"].values())
    assert (tmp_path / "loss.png").stat().st_size > 0


def test_wrong_options_are_refused_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--steps", "0", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (2, "elastic_lm: --steps: expected a positive number, got 0\n")
