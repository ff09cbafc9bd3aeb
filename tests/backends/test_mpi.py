"""The MPI backend under a real ``mpiexec``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.backends.extras import need, need_program, outputs_of, pytest_command

INSTALL = 'pip install "asyncpar[mpi]" mpich'
pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


@pytest.fixture(name="mpiexec")
def find_mpiexec() -> str:
    need("mpi4py", INSTALL)
    return need_program("mpiexec", INSTALL)


def exercise(mpiexec: str, home: Path, what: str, *more: str) -> dict[str, Any]:
    command = [mpiexec, "-n", "2", sys.executable, "-m", "tests.backends.exercise", "mpi", what, *more]
    found: dict[str, Any] = json.loads(outputs_of(command, home=home)[0].splitlines()[-1])
    return found


def test_communicators_and_lanes_over_two_processes_keep_their_promises(mpiexec: str, tmp_path: Path) -> None:
    [output] = outputs_of([mpiexec, "-n", "2", *pytest_command("over_mpi")], home=tmp_path, timeout=280)
    assert output.count(" passed") == 2
    assert "skipped" not in output


def test_one_process_alone_is_a_world_of_one(mpiexec: str, tmp_path: Path) -> None:
    program = (
        "import asyncpar as ap, numpy as np\n"
        "from asyncpar.backends import CommunicationRuntime\n"
        "async def main():\n"
        "    async with CommunicationRuntime() as runtime:\n"
        "        group = await runtime.initialize('mpi')\n"
        "        print(group.size, (await group.communicator.all_reduce(np.ones(3))).tolist())\n"
        "ap.run(main)\n"
    )
    assert outputs_of([sys.executable, "-c", program], home=tmp_path) == ["1 [1.0, 1.0, 1.0]\n"]


def test_a_runtime_opens_the_backend_again_and_again(mpiexec: str, tmp_path: Path) -> None:
    found = exercise(mpiexec, tmp_path, "work")
    assert found == {"sums": [3.0, 3.0], "lane": "mpi", "alone": 1, "cancelled_by": [0, 0], "bytes": 1_600_000}


def test_a_rank_that_leaves_early_is_named(mpiexec: str, tmp_path: Path) -> None:
    found = exercise(mpiexec, tmp_path, "leave")
    assert found["lost"] == 1
    assert found["cause"] == "it left the world"


def test_a_rank_that_dies_ends_the_job(mpiexec: str, tmp_path: Path) -> None:
    command = [mpiexec, "-n", "2", sys.executable, "-m", "tests.backends.exercise", "mpi", "die"]
    outputs_of(command, home=tmp_path, statuses=[3])


def test_a_rank_that_hangs_keeps_nobody_from_ending(mpiexec: str, tmp_path: Path) -> None:
    assert exercise(mpiexec, tmp_path, "hang") == {"lost": None, "late": 1}


def test_a_world_size_that_is_not_that_of_mpi_is_refused(mpiexec: str, tmp_path: Path) -> None:
    command = [mpiexec, "-n", "2", sys.executable, "-m", "tests.backends.exercise", "mpi", "work", "--size", "3"]
    [output] = outputs_of(command, home=tmp_path, statuses=[1])
    assert "world_size: expected 2, which is what the mpi backend was started with here, got 3" in output


def test_the_example_runs(mpiexec: str, tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "scripts" / "examples" / "backends.py"
    [output] = outputs_of([mpiexec, "-n", "2", sys.executable, str(script), "--backend", "mpi"], home=tmp_path)
    assert output.count("of 2: the mean is 0.5000") == 2
