"""scripts/examples/torch_hook.py as its users run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.program_host import ProgramHost

SCRIPT = Path(__file__).parents[2] / "scripts" / "examples" / "torch_hook.py"
pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]  # torch itself takes long to start


def alone() -> dict[str, str]:
    """Return the environment of a program that no launcher has started."""
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}


def run(*words: str) -> tuple[str, str]:
    command = [sys.executable, *words, str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=160, check=False, env=alone())
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


def test_the_model_learns_with_compressed_gradients() -> None:
    output, _ = run("-m", "asyncpar", "launch", "--nproc-per-node", "2")
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", output)]
    assert len(losses) == 3
    assert losses[-1] < 0.5 * losses[0]


def test_without_a_launcher_it_says_how_to_start_it(host: ProgramHost, tmp_path: Path) -> None:
    done = host.run(SCRIPT, home=tmp_path, environment=alone())
    assert done.returncode == 1
    assert done.stderr == "torch_hook: start it with: asyncpar launch --nproc-per-node 2 torch_hook.py\n"


def test_one_rank_is_too_few(host: ProgramHost, tmp_path: Path) -> None:
    done = host.run(SCRIPT, home=tmp_path, environment=alone() | {"RANK": "0", "WORLD_SIZE": "1"})
    assert done.returncode == 1
    assert done.stderr == (
        "torch_hook: expected at least 2 ranks, which have gradients to exchange: --nproc-per-node 2\n"
    )
