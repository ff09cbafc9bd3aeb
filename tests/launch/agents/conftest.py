"""Commands that end by themselves beside agents of a test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.agents.agent_groups import LIMIT, AgentGroup
from tests.program_host import ProgramHost
from tests.soak import is_soak

Run = Callable[..., "subprocess.CompletedProcess[str]"]
"""Runs a command of ``asyncpar``."""

_PROGRAM = Path(__file__).parents[1] / "launch_program.py"


@pytest.fixture
def run(group: AgentGroup, launch_host: ProgramHost) -> Run:
    """Run a command on this machine, which all agents of the test's ``group`` are on."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ASYNCPAR_", "XDG_RUNTIME"))}
    environment = clean | {"TMPDIR": str(group.folder / "tmp"), "PYTHONPATH": str(Path.cwd())}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        if not is_soak():
            return launch_host.run(_PROGRAM, *words, home=group.folder, environment=environment)
        return subprocess.run(
            [sys.executable, "-m", "asyncpar", *words],
            cwd=group.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )

    return run
