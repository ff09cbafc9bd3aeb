"""Ranks that a cell of a Jupyter kernel runs: what they print, and how far they are, is shown below that cell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.kernels import Kernel, start_kernel

pytest.importorskip("ipykernel", reason="ipykernel (extra test) is not installed")

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

TRAINING = """
def train(folder):
    import os, time
    import asyncpar as ap
    print("rank", os.environ["RANK"], "begins", flush=True)
    with ap.progress("train", total=3) as bar:
        for step in range(3):
            while not os.path.exists(f"{{folder}}/{{step}}"):
                time.sleep(0.02)
            bar.advance(loss=0.5)
    return int(os.environ["RANK"])

print(ap.cluster.run(train, {folder!r}, ranks=2, pickle=True))
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with start_kernel() as kernel:
        yield kernel


def test_output_and_progress_are_shown_below_a_cell_while_it_runs(kernel: Kernel, tmp_path: Path) -> None:
    cell = kernel.begin(TRAINING.format(folder=str(tmp_path)))
    kernel.wait(cell, lambda: "rank 0 begins\n" in cell.printed and "1] rank 1 begins\n" in cell.errors)
    for step in range(3):
        assert f"train {step + 1}/3" not in cell.errors
        (tmp_path / str(step)).touch()
        kernel.wait(cell, lambda step=step: f"train {step + 1}/3" in cell.errors)  # type: ignore[misc]
    kernel.finish(cell)
    assert (cell.printed, cell.raised) == ("rank 0 begins\n[0, 1]\n", ""), cell
    assert cell.errors.rpartition("\r")[2].endswith("train 3/3 (100%) loss=0.5\n"), cell  # one line, which changes


def test_the_output_of_a_cell_is_its_own_and_a_failure_is_raised_in_it(kernel: Kernel) -> None:
    first = kernel.run("ap.cluster.run(programs.speak, ranks=1)")
    failed = kernel.run("ap.cluster.run(programs.fail, 0, ranks=1)")
    assert (first.printed, first.raised) == ("rank 0 says hello\n", ""), first
    assert "0] rank 0 complains\n" in first.errors
    assert "speaking 1/7" in first.errors
    assert (failed.raised, "hello" in failed.printed) == ("ExceptionGroup", False), failed
