"""The bench of strangers: what it makes of its samples, and a short run of it."""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.chaos.half_open import Stretch, is_held, show

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "chaos" / "half_open.py"
ARGUMENTS = argparse.Namespace(size=4096, nproc=2, rounds=2, connections=3)
STRETCHES = [
    Stretch(0.0, 1.0, {}),
    Stretch(1.0, 2.0, {"gRPC": 6, "TCP": 4}),
    Stretch(3.0, 4.0, {}),
    Stretch(4.0, 5.0, {"gRPC": 5, "TCP": 4}),
]


@pytest.mark.parametrize(("slower", "code"), [(1.0, 0), (1.04, 0), (1.06, 1)])
def test_the_ratio_is_the_median_over_the_rounds(slower: float, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    samples = [(begin + turn / 10, 0.001) for begin in (0.0, 3.0) for turn in range(10)]
    samples += [(begin + turn / 10, 0.001 * slower) for begin in (1.0, 4.0) for turn in range(10)]
    samples.append((2.5, 9.0))  # between the stretches
    assert show(samples, STRETCHES, 3 << 20, ARGUMENTS) == code
    shown = capsys.readouterr().out
    assert f"ratio (median of 2 rounds): {slower:.3f}, wanted at most 1.05" in shown
    assert "gRPC: 6 of 6 strangers were still there at the end" in shown
    assert "grew by 3.0 MiB" in shown


def test_a_connection_is_held_until_its_other_side_closes() -> None:
    one, other = socket.socketpair()
    one.setblocking(False)
    assert is_held(one)
    other.send(b"settings")
    assert is_held(one)
    other.close()
    assert not is_held(one)
    one.close()


@pytest.mark.soak
@pytest.mark.process
def test_a_short_run_prints_its_figures() -> None:
    command = [sys.executable, str(SCRIPT), "--nproc", "2", "--size", "4K", "--connections", "5"]
    command += ["--rounds", "1", "--seconds", "0.3"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    assert "ratio (median of 1 rounds)" in ran.stdout, ran.stderr
    assert "TCP: 10 of 10 strangers" in ran.stdout
