"""Faults of ranks under agents, as people run them: a few, with a small model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts" / "bench" / "chaos"
SMALL = ["--portions", "6", "--megabytes", "0.1"]
pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


def run(script: str, *options: str) -> dict[str, Any]:
    """Return the figures that a script prints."""
    command = [sys.executable, str(SCRIPTS / script), *SMALL, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(found: dict[str, Any], goal: str) -> list[str]:
    return [value for number, _, value, _ in found["rows"] if number == goal]


@pytest.mark.soak
def test_ranks_are_killed_and_come_again_and_every_bit_is_compared() -> None:
    found = run("chaos.py", "--ranks", "3", "--faults", "1", "--kinds", "kill", "--compute", "0.02")
    assert [fault["kind"] for fault in found["faults"]] == ["kill"]
    assert measured(found, "G1") == ["bit-equal"]
    assert "-" not in measured(found, "G3"), "the others went on"


@pytest.mark.soak
def test_ranks_are_drained_by_the_clock_and_every_step_is_compared() -> None:
    times = ("--minutes", "0.2", "--calibrate", "2", "--every", "1")
    found = run("endurance.py", "--ranks", "2", "--kinds", "drain", "--compute", "0.05", *times)
    assert {fault["kind"] for fault in found["faults"]} == {"drain"}
    assert measured(found, "G1") == ["bit-equal"]
    assert measured(found, "G11") == ["0"]
