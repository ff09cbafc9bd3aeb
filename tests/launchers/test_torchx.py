"""``torchx run dist.asyncpar`` with the local scheduler of torchx, which `scripts/test-backends` installs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.backends.extras import REQUIRED

TORCHX = Path(sys.prefix) / "torchx"
PROGRAM = Path(__file__).with_name("ranks.py")
pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not os.environ.get(REQUIRED), reason="scripts/test-backends installs torchx and runs these"),
]


def torchx(home: Path, *arguments: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": str(home), "TMPDIR": str(home), "PYTHONPATH": str(TORCHX)}
    command = [sys.executable, "-W", "ignore", "-m", "torchx.cli.main", *arguments]
    done = subprocess.run(
        command,
        cwd=home,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=90,
        check=False,
    )
    return done.stdout


def test_the_component_is_there_beside_those_of_torchx(tmp_path: Path) -> None:
    listed = torchx(tmp_path, "builtins")
    for name in ("dist.asyncpar", "dist.ddp", "utils.echo"):
        assert name in listed, listed


def test_two_hosts_of_two_ranks_make_one_world(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(32))
    secret.chmod(0o600)
    job = ["--script", str(PROGRAM), "--secret_file", str(secret), "--rdzv_port", "29417", "sum"]
    output = torchx(tmp_path, "run", "-s", "local_cwd", "--wait", "--log", "dist.asyncpar", "-j", "2x2", *job)
    assert "SUCCEEDED" in output, output
    for rank in range(4):
        assert f"rank {rank} of 4 sum 10" in output, output


@pytest.mark.parametrize(
    ("job", "message"),
    [(["-j", "2x2"], "--secret_file: needed with several hosts"), (["-j", "1:2x2"], "-j: expected a number of hosts")],
)
def test_what_cannot_run_is_told_before_it_is_scheduled(tmp_path: Path, job: list[str], message: str) -> None:
    output = torchx(tmp_path, "run", "-s", "local_cwd", "dist.asyncpar", *job, "--script", str(PROGRAM))
    assert message in output, output
