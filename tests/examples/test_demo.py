"""``scripts/demo`` as a new user runs it, in an environment that is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak import first

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "scripts" / "demo"

pytestmark = pytest.mark.process


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Variables for an environment that the script takes for its own, with the Python that runs the tests."""
    home = tmp_path / "environment"
    (home / "bin").mkdir(parents=True)
    for name, command in {"python": sys.executable, "asyncpar": f"{sys.executable} -m asyncpar"}.items():
        (home / "bin" / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (home / "bin" / name).chmod(0o755)
    checksum = subprocess.run(
        ["cksum"], input=(ROOT / "pyproject.toml").read_bytes(), capture_output=True, check=True
    ).stdout.decode()
    (home / ".asyncpar-checkpoint,plot").write_text(f"{checksum.strip()} {ROOT}\n")
    return {**os.environ, "ASYNCPAR_VENV": str(home), "COLUMNS": "60"}


def demo(*arguments: str, environment: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(DEMO), *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("kill", first(1, [("--kill",), ()]), ids=first(1, ["kill", "plain"]))
def test_help_is_printed_once_and_fits_a_narrow_terminal(
    kill: tuple[str, ...], environment: dict[str, str], tmp_path: Path
) -> None:
    done = demo(*kill, "--help", environment=environment, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("--steps STEPS   ") + done.stdout.count("--steps STEPS\n") == 1
    assert ("--ranks RANKS" in done.stdout) == bool(kill)
    assert [line for line in done.stdout.splitlines()[:8] if len(line) > 60] == []


@pytest.mark.timeout(150)
def test_it_ends_with_a_sentence_and_writes_where_its_caller_is(environment: dict[str, str], tmp_path: Path) -> None:
    small = ["--steps", "2", "--batch", "8", "--seq", "16", "--dim", "32", "--heads", "2", "--out", "mine"]
    done = demo(*small, environment=environment, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    *_, sentence, last = done.stdout.splitlines()
    assert sentence.startswith("four ranks and one process agree: losses differ by at most ")
    assert (tmp_path / "mine" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "mine" / "summary.json").read_text())["last_loss"] == json.loads(last)["last_loss"]


@pytest.mark.parametrize(("kill", "program"), first(1, [(("--kill",), "elastic_lm"), ((), "train_lm")]))
def test_a_wrong_argument_is_one_line(
    kill: tuple[str, ...], program: str, environment: dict[str, str], tmp_path: Path
) -> None:
    done = demo(*kill, "--stepps", "2", environment=environment, folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert next(line for line in done.stderr.splitlines() if f"{program}:" in line).endswith("arguments: --stepps 2")
    assert "Traceback" not in done.stderr
