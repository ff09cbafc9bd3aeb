"""scripts/bench/figures/overlap.py as people run it: tiny sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.figures.overlap import hidden_part, main, show
from tests.bench.refusals import refusal_of

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "figures" / "overlap.py"
TINY = ("--size", "400000", "--parameters", "4", "--bucket-mb", "0.1", "--iterations", "1")
FIGURES = {"communication": 0.100, "compute": 0.120, "both": 0.128, "overlap_fraction": 0.94}


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.parametrize("options", [("--compute", "matmul"), ("--int8", "--views")], ids=["matmul", "int8"])
def test_all_figures_are_measured(options: tuple[str, ...], tmp_path: Path) -> None:
    target = tmp_path / "overlap.json"
    command = [sys.executable, str(SCRIPT), *TINY, *options, "--json", str(target)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert run.returncode == 0, run.stderr
    assert "0.4 MB, 2 ranks over tcp" in run.stdout
    assert "of the communication, 0.9 wanted" in run.stdout
    figures = json.loads(target.read_text())
    assert figures["lane"] == "tcp"
    assert figures["wrong"] == 0
    assert min(figures[name] for name in ("communication", "compute", "both")) > 0.0
    assert 0.0 <= figures["overlap_fraction"] <= 1.0


def test_what_both_take_more_than_compute_is_not_hidden() -> None:
    assert hidden_part(FIGURES) == pytest.approx(0.92)
    assert hidden_part(FIGURES | {"both": 0.220}) == pytest.approx(0.0)
    assert hidden_part(FIGURES | {"both": 0.119}) == 1.0


def test_the_verdicts_say_what_is_short_and_what_is_apart() -> None:
    lines = show(FIGURES, "title")
    assert lines[-2] == "hidden: 0.920 of the communication, 0.9 wanted: ok"
    assert lines[-1] == "overlap fraction of the statistics: 0.940, within 0.1 wanted: ok"
    lines = show(FIGURES | {"both": 0.200, "overlap_fraction": 0.5}, "title")
    assert lines[-2].endswith(": short")
    assert lines[-1].endswith(": apart")


@pytest.mark.parametrize("wrong", [("--size", "0"), ("--factor", "0"), ("--megabits", "0"), ("--bucket-mb", "-1")])
def test_options_out_of_range_are_refused(wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = refusal_of(main, wrong, capsys)
    assert code == 2
    assert wrong[0] in printed
