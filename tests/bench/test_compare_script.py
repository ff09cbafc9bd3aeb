"""scripts/bench/compare/compare.py as people run it, with peers that are stand-ins."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.compare.compare import main
from tests.bench.refusals import refusal_of

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "compare" / "compare.py"
QUICK = ("--ranks", "2", "--rounds", "2", "--budget", "0.01", "--sizes", "4,1K")
RECORD = '{"op": "all_reduce", "size": %d, "seconds": %s, "iterations": 5, "wrong": %d}'


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


def make_program(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def make_gloo(root: Path, body: str) -> None:
    """A Python that knows torch's version, and measures by doing ``body``."""
    make_program(root / "gloo" / "bin" / "python", f'if [ "$1" = -c ]; then echo 2.0; else {body}; fi')


def records(*figures: tuple[int, float, int]) -> str:
    return "; ".join(f"echo '{RECORD % figure}'" for figure in figures)


def document(out: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((out / "compare.json").read_text())
    return read


@pytest.mark.soak
@pytest.mark.process
def test_without_peers_our_own_figures_are_shown(tmp_path: Path) -> None:
    done = run(*QUICK, "--ops", "all_reduce,barrier", "--envs", tmp_path / "none", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Gloo is left out: not in" in done.stderr
    assert "| 1 KiB |" in done.stdout
    assert (tmp_path / "compare.md").read_text() == done.stdout
    results = document(tmp_path)["results"]
    assert [(entry["op"], entry["size"]) for entry in results] == [
        ("all_reduce", 4),
        ("all_reduce", 1024),
        ("barrier", 0),
    ]
    assert all(len(entry["seconds"]["asyncpar"]) == 2 for entry in results)


@pytest.mark.soak
@pytest.mark.process
def test_peers_stand_beside_us_with_ratios_and_verdicts(tmp_path: Path) -> None:
    make_gloo(tmp_path, records((4, 100.0, 0), (1024, 100.0, 0)))
    make_program(tmp_path / "mpich" / "bin" / "python", "echo 5.0")
    make_program(tmp_path / "mpich" / "bin" / "mpiexec", records((4, 1e-9, 0), (1024, 1e-9, 0)))
    once = ("--rounds", "1", "--ops", "all_reduce")
    done = run(*QUICK, *once, "--envs", tmp_path, "--peers", "gloo,mpich", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    verdicts = {(verdict["peer"], verdict["sizes"]): verdict["ok"] for verdict in document(tmp_path)["verdicts"]}
    assert verdicts == {("gloo", "every size"): True, ("best MPI", "below 64 KB"): False}
    assert "MPICH (mpich 5.0)" in done.stdout
    assert document(tmp_path)["results"][0]["seconds"]["gloo"] == [100.0]


@pytest.mark.soak
@pytest.mark.process
def test_the_tcp_lane_is_judged_by_its_own_targets(tmp_path: Path) -> None:
    make_gloo(tmp_path, records((4, 100.0, 0), (1024, 100.0, 0)))
    options = ("--ops", "all_reduce", "--envs", tmp_path, "--peers", "gloo", "--transport", "tcp", "--out", tmp_path)
    done = run(*QUICK, *options)
    assert done.returncode == 0, done.stderr
    assert [verdict["sizes"] for verdict in document(tmp_path)["verdicts"]] == ["up to 64 KB"]
    assert document(tmp_path)["lanes"] == ["tcp"]


@pytest.mark.soak
@pytest.mark.process
def test_wrong_elements_and_failures_of_a_peer_are_reported(tmp_path: Path) -> None:
    make_gloo(tmp_path, records((4, 1.0, 3)))
    make_program(tmp_path / "mpich" / "bin" / "python", "echo 5.0")
    make_program(tmp_path / "mpich" / "bin" / "mpiexec", "echo no luck >&2; exit 3")
    done = run(*QUICK, "--ops", "all_reduce", "--envs", tmp_path, "--peers", "gloo,mpich", "--out", tmp_path)
    assert done.returncode == 1
    assert document(tmp_path)["wrong"]["gloo"] == 2
    assert len(document(tmp_path)["failures"]) == 2
    assert "no luck" in done.stderr
    assert "| 1 KiB |" in done.stdout


@pytest.mark.soak
@pytest.mark.process
def test_ctrl_c_shows_what_there_is_and_leaves_nothing(tmp_path: Path) -> None:
    make_gloo(
        tmp_path,
        f'echo "$$" > "{tmp_path}/pid$RANK.new"; mv "{tmp_path}/pid$RANK.new" "{tmp_path}/pid$RANK"; sleep 1000',
    )
    options = ("--ops", "all_reduce", "--envs", tmp_path, "--peers", "gloo", "--out", tmp_path)
    command = [sys.executable, str(SCRIPT), *QUICK, *map(str, options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        pids = [tmp_path / f"pid{rank}" for rank in range(2)]
        while not all(pid.exists() for pid in pids):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=50)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert "| 1 KiB |" in stdout
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ops", "juggle"), "--ops: expected some of all_reduce, "),
        (("--peers", "nccl"), "--peers: expected some of gloo, mpich, openmpi, intel, got 'nccl'"),
        (("--sizes", "4T"), "--sizes: expected a size"),
        (("--ranks", "two"), "invalid literal"),
        (("--ranks", "0"), "expected positive numbers"),
        (("--rounds", "0"), "expected positive numbers"),
    ],
)
def test_mistakes_are_reported_before_anything_runs(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed = refusal_of(main, options, capsys)
    assert code == 2
    assert message in printed
