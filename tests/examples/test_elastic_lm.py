"""The elastic language model, as its users run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.program_host import ProgramHost

SCRIPT = Path(__file__).parents[2] / "scripts" / "examples" / "elastic_lm.py"
SIZES = ["--batch", "4", "--portions", "4", "--seq", "8", "--dim", "8", "--layers", "1", "--heads", "1"]
SMALL = [*SIZES, "--text", str(SCRIPT)]
pytestmark = pytest.mark.process


@pytest.mark.timeout(150)
def test_a_rank_that_is_killed_and_replaced_changes_no_byte(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--kill", "--ranks", "2", "--steps", "160", *SMALL, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=140, check=False)
    assert done.returncode == 0, done.stderr
    *_, sentence, last = done.stdout.splitlines()
    figures = json.loads(last)
    assert sentence == (
        "2 ranks, one of them killed and replaced, and one undisturbed process agree: "
        "all 160 losses and every byte of the parameters are the same"
    )
    assert figures["same_bytes"] is True
    assert any("was killed by SIGKILL" in change for change in figures["changes"].values())
    assert (tmp_path / "loss.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--steps", "0"], "--steps: expected a positive number, got 0"),
        (["--kill", "--ranks", "1"], "--ranks: expected 2 or more, of which one is killed, got 1"),
        (["--kill", "--codec", "int8"], "--codec: has no effect on elastic ranks here; leave it out"),
        (["--checkpoint", "saved"], "--checkpoint: has no effect on elastic ranks here; leave it out"),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    tmp_path: Path, wrong: list[str], message: str, host: ProgramHost
) -> None:
    done = host.run(SCRIPT, *wrong, "--out", tmp_path, home=tmp_path, environment=os.environ)
    assert (done.returncode, done.stderr) == (2, f"elastic_lm: {message}\n")
