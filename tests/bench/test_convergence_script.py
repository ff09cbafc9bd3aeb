"""scripts/bench/figures/convergence.py: figures and verdicts, and a tiny run as people run it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.bench.figures.convergence import make_configurations, parse_arguments
from scripts.bench.figures.convergence_figures import Configuration, Outcome, judge, make_table, smooth

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "figures" / "convergence.py"
BASE = Outcome(configuration=Configuration(), held_out_loss=2.0, last_loss=2.1, bytes_per_rank=4_000_000, seconds=3.0)


def outcome(loss: float, sent: int, *, mode: str = "sync", codec: str = "none") -> Outcome:
    return replace(BASE, configuration=Configuration(mode, codec), held_out_loss=loss, bytes_per_rank=sent)


def test_uncompressed_training_comes_first_and_nothing_twice() -> None:
    options = parse_arguments(["--codecs", "int8,none", "--modes", "local:4,diloco:20/int4,local:4"])
    assert make_configurations(options) == [
        Configuration(),
        Configuration("sync", "int8"),
        Configuration("local:4", "none"),
        Configuration("diloco:20", "int4"),
    ]


def test_labels_say_what_is_not_ordinary_and_name_folders() -> None:
    assert Configuration().label == "uncompressed"
    assert Configuration("sync", "topk:0.01+int8").label == "topk:0.01+int8"
    assert Configuration("diloco:20", "int4").label == "diloco:20, int4"
    assert Configuration("diloco:20", "int4").folder == "diloco_20-int4"


@pytest.mark.parametrize(
    ("codec", "loss", "sent", "reached"),
    [
        ("int8", 2.009, 1_010_000, True),
        ("int8", 1.9, 1_010_000, True),
        ("int8", 2.011, 1_010_000, False),
        ("int8", 2.0, 2_000_000, False),
        ("int4", 2.019, 520_000, True),
        ("topk:0.01", 2.059, 70_000, True),
        ("topk:0.01", 2.061, 70_000, False),
        ("sign", 3.0, 1, None),
    ],
)
def test_codecs_are_judged_by_loss_and_saving(codec: str, loss: float, sent: int, reached: bool | None) -> None:
    assert judge(outcome(loss, sent, codec=codec), BASE) is reached


def test_diloco_is_judged_at_twenty_steps_whatever_its_momentum() -> None:
    assert judge(outcome(2.05, 200_500, mode="diloco:20:0.7:0.7"), BASE) is True
    assert judge(outcome(2.07, 200_500, mode="diloco:20"), BASE) is False
    assert judge(outcome(2.07, 200_500, mode="diloco:10"), BASE) is None


def test_the_table_compares_all_with_the_first() -> None:
    table = make_table([BASE, outcome(2.002, 1_010_000, codec="int8"), outcome(2.2, 66_000, codec="topk:0.01")])
    assert table[2] == "| sync | none | 2.0000 |  | 4.0 MB | 1x | 3 s |  |"
    assert table[3] == "| sync | int8 | 2.0020 | +0.10% | 1.0 MB | 3.96x | 3 s | 0.5%, 3.7x: reached |"
    assert table[4] == "| sync | topk:0.01 | 2.2000 | +10.00% | 66.0 kB | 60.6x | 3 s | 3.0%, 25x: missed |"


def test_curves_are_means_over_windows() -> None:
    assert smooth([1.0, 3.0, 5.0, 7.0, 9.0], 2) == [2.0, 6.0]


@pytest.mark.soak
@pytest.mark.process
def test_a_tiny_run_writes_table_figures_and_picture(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(32, 127)) * 200)
    out = tmp_path / "out"
    options = ["--steps", "4", "--codecs", "int8", "--modes", "", "--text", str(text), "--out", str(out)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "| sync | int8 |" in done.stdout
    assert (out / "convergence.md").read_text().strip() == done.stdout.strip()
    figures = json.loads((out / "convergence.json").read_text())["outcomes"]
    assert [one["configuration"]["codec"] for one in figures] == ["none", "int8"]
    assert [len(one["losses"]) for one in figures] == [4, 4]
    assert 3.0 < figures[0]["bytes_per_rank"] / figures[1]["bytes_per_rank"] < 4.0
    assert (out / "convergence.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.process
def test_a_run_that_fails_is_shown_and_ends_the_program(tmp_path: Path) -> None:
    options = ["--steps", "4", "--codecs", "", "--modes", "", "--text", "/nowhere", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 1
    assert "convergence: uncompressed failed:" in done.stderr
    assert "/nowhere does not exist" in done.stderr
