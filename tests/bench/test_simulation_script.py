"""scripts/bench/chaos/simulation.py: seeds by the clock, in several processes; seeds that fail are reported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncpar.testing.simulation import KINDS, SimulationFailed
from scripts.bench.chaos import simulation
from tests.bench.refusals import refusal_of

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "chaos" / "simulation.py"


def test_all_kinds_of_faults_but_those_of_disks_are_drawn() -> None:
    assert set(simulation.ELASTIC) == KINDS.keys() - {"disk"}


@pytest.mark.soak
def test_a_run_by_the_clock_reports_how_many_seeds_took_how_long() -> None:
    command = [sys.executable, str(SCRIPT), "--seeds", "3", "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["seeds"], found["failed"], found["processes"]) == (3, 0, 2)
    assert found["seconds"] > 0.0
    assert found["events_per_seed"] > 0.0


def test_seeds_after_one_that_fails_are_run_too(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fails_at_one(*, seeds: list[int], **_settings: Any) -> list[Any]:
        tried.extend(seeds)
        if seeds == [1]:
            raise SimulationFailed(ValueError("wrong"), seed=1, size=3, faults=(), trace_hash="0")
        return []

    monkeypatch.setattr(simulation, "elastic", fails_at_one)
    failures, events = simulation.run_seeds(range(3), 1.0)
    assert tried == [0, 1, 2]
    assert events == 0
    assert len(failures) == 1
    assert "ValueError: wrong" in failures[0]
    assert "seed 1" in failures[0]


@pytest.mark.parametrize("arguments", [["--seeds", "0"], ["--processes", "0"]])
def test_no_seeds_and_no_processes_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = refusal_of(simulation.main, arguments, capsys)
    assert code != 0
    assert "expected 1 or more" in printed
