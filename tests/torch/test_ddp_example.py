"""scripts/examples/torch_ddp.py as its users run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.program_host import ProgramHost

SCRIPT = Path(__file__).parents[2] / "scripts" / "examples" / "torch_ddp.py"
LAUNCH = ("-m", "asyncpar", "launch", "--nproc-per-node", "2")
pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]  # torch itself takes long to start


def alone() -> dict[str, str]:
    """Return the environment of a program that no launcher has started."""
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}


def launch(*words: str) -> tuple[str, str]:
    command = [sys.executable, *LAUNCH, str(SCRIPT), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=160, check=False, env=alone())
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("words", [("--codec", "int8"), ("--fsdp",)], ids=["int8", "fsdp"])
def test_it_trains(words: tuple[str, ...]) -> None:
    output, errors = launch("--steps", "3", *words)
    assert re.search(r"2 ranks, 3 steps in .* loss 0\.[0-9]+", output), errors


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--steps", "0"), "--steps: expected at least 1, got 0"),
        (("--fsdp", "--codec", "int8"), "--codec: expected DDP on asyncpar"),
        (("--codec", "zip"), "--codec: codec: expected one of none, "),
        (("--backend", "pigeon"), "--backend: expected one of "),
    ],
    ids=["steps", "fsdp and codec", "codec", "backend"],
)
def test_words_that_make_no_sense_are_one_line(
    words: tuple[str, ...], expected: str, host: ProgramHost, tmp_path: Path
) -> None:
    done = host.run(SCRIPT, *words, home=tmp_path, environment=alone())
    assert done.returncode == 2
    errors = done.stderr
    assert f"torch_ddp.py: error: {expected}" in errors.strip().splitlines()[-1]
    assert "Traceback" not in errors


def test_without_a_launcher_it_says_how_to_start_it(host: ProgramHost, tmp_path: Path) -> None:
    done = host.run(SCRIPT, home=tmp_path, environment=alone())
    assert done.returncode == 1
    assert done.stderr == "torch_ddp: start it with: torchrun --nproc-per-node 2 torch_ddp.py, or asyncpar launch\n"
