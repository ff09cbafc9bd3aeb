"""``scripts/test-gpu`` says that there is no GPU, by a status of its own, instead of testing nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.backends.extras import ROOT

NO_GPU = 3


@pytest.mark.process
@pytest.mark.parametrize("status", [0, 9])
def test_without_a_gpu_nothing_is_tested_and_that_is_no_success(tmp_path: Path, status: int) -> None:
    """Where nvidia-smi lists no GPU, and where it fails, as without a driver."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nexit {status}\n")
    program.chmod(0o700)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [ROOT / "scripts" / "test-gpu"],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert (done.returncode, done.stdout) == (NO_GPU, "")
    assert "this host has no GPU (nvidia-smi lists none); nothing was tested" in done.stderr
