"""On a host whose loopback interface is down everything that needs it ends at once, and says so as the doctor does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from asyncpar.core import addresses
from asyncpar.core.addresses import check_reaches_itself
from asyncpar.errors import UsageError
from asyncpar.launch.doctor.findings import Verdict
from asyncpar.launch.doctor.host_checks import check_loopback
from tests.soak import first

ADVICE = "bring the interface lo up (ip link set lo up), and let a firewall pass 127.0.0.0/8"
ASYNCPAR = (sys.executable, "-m", "asyncpar")
SCRIPT = """
import asyncpar as ap

async def main():
    async with ap.init() as node:
        print("rank", node.rank, "of", node.size)

ap.run(main)
"""
STARTS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "launch": ((*ASYNCPAR, "launch", "--nproc-per-node", "2", "x.py"), {}),
    "agent": ((*ASYNCPAR, "agent", "--listen", "127.0.0.1:29477"), {}),
    "a rank of srun": (
        (sys.executable, "x.py"),
        {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1"}
        | {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
        | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "here"},
    ),
    "a launch of several hosts": (
        (*ASYNCPAR, "launch", "--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:29477", "x.py"),
        {},
    ),
    "an elastic launch": (
        (*ASYNCPAR, "launch", "--elastic", "ranks", "--rdzv-endpoint", "127.0.0.1:29477", "x.py"),
        {},
    ),
}


def _cannot_unshare() -> bool:
    if shutil.which("unshare") is None:
        return True
    return subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False).returncode != 0


@pytest.mark.process
@pytest.mark.skipif(_cannot_unshare(), reason="no namespaces of networks here")
@pytest.mark.parametrize("start", first(3, STARTS))
def test_a_start_without_loopback_ends_at_once_with_the_cause(start: str, tmp_path: Path) -> None:
    command, variables = STARTS[start]
    (tmp_path / "x.py").write_text(SCRIPT)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ASYNCPAR_", "SLURM_"))}

    done = subprocess.run(
        ["unshare", "-rn", *command],
        cwd=tmp_path,
        env=clean | variables,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )

    assert done.returncode != 0
    assert "this host does not reach itself at 127.0.0.1 (Network is unreachable); " + ADVICE in done.stderr


@pytest.mark.process
@pytest.mark.skipif(_cannot_unshare(), reason="no namespaces of networks here")
def test_a_world_of_one_needs_no_loopback(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(SCRIPT)
    command = ["unshare", "-rn", sys.executable, "x.py"]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=55, check=False)

    assert (done.stdout, done.returncode) == ("rank 0 of 1\n", 0), done.stderr


def test_the_check_and_the_doctor_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    check_reaches_itself("127.0.0.1")
    assert check_loopback().verdict is Verdict.OK

    def refuse(address: str) -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(addresses, "try_connection", refuse)
    monkeypatch.setattr("asyncpar.launch.doctor.host_checks.try_connection", refuse)
    with pytest.raises(UsageError, match="rank 1: this host does not reach itself") as caught:
        check_reaches_itself("127.0.0.1", what="rank 1")
    assert str(caught.value).endswith(check_loopback().advice)
