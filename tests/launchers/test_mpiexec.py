"""``mpiexec -n 3 python train.py`` of three MPIs, without mpi4py."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.backends.extras import ROOT, need_program, outputs_of
from tests.soak import first

PROGRAM = str(Path(__file__).with_name("ranks.py"))
PREFIX = Path(sys.prefix)
PROGRAMS = {
    "MPICH": "mpiexec",
    "Open MPI": str(PREFIX / "mpi" / "openmpi" / "bin" / "mpiexec"),
    "Intel MPI": str(PREFIX / "mpi" / "impi-rt" / "bin" / "mpiexec"),
}
TINY = ("--steps", "3", "--batch", "8", "--seq", "16", "--dim", "32", "--layers", "1", "--heads", "2")
LOSSES = ("ranks", "steps", "first_loss", "last_loss")
pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


@pytest.fixture(name="mpiexec", params=PROGRAMS)
def find_mpiexec(request: pytest.FixtureRequest) -> list[str]:
    name: str = request.param
    return [need_program(PROGRAMS[name], "scripts/test-backends installs it"), "-n", "3", sys.executable, PROGRAM]


def left_over(home: Path) -> list[str]:
    return [str(path) for path in home.rglob("*@*")]


def test_ranks_find_their_place_world_after_world(mpiexec: list[str], tmp_path: Path) -> None:
    outputs = outputs_of([*mpiexec, "twice"], [*mpiexec, "sum"], home=tmp_path)
    for output in outputs:
        lines = sorted(line for line in output.splitlines() if line.startswith("rank"))
        assert [line.partition(" hosts")[0] for line in lines] == [f"rank {rank} of 3 sum 6" for rank in range(3)]
    assert left_over(tmp_path) == []


def test_a_rank_that_fails_ends_the_job_with_its_cause(mpiexec: list[str], tmp_path: Path) -> None:
    # which code mpiexec gives when one rank fails of itself and the others because of it is its own matter
    [output] = outputs_of(["sh", "-c", '"$@" && exit 99; exit 7', "sh", *mpiexec, "fail"], home=tmp_path, statuses=[7])
    assert "ValueError: the data of rank 1 is damaged" in output


def test_a_program_that_a_rank_starts_is_no_rank(tmp_path: Path) -> None:
    mpiexec = need_program("mpiexec", "pip install mpich")
    [output] = outputs_of([mpiexec, "-n", "2", sys.executable, PROGRAM, "child"], home=tmp_path)
    refused = re.findall(r"child: .*ASYNCPAR_PLACED: a rank has started this program", output)
    assert len(refused) == 2, output


@pytest.mark.parametrize("mpiexec", first(1, PROGRAMS), indirect=True)
def test_the_language_model_has_the_losses_of_the_launcher(mpiexec: list[str], tmp_path: Path) -> None:
    ranks = [str(ROOT / "scripts" / "examples" / "engines" / "ranks.py"), *TINY]
    launch = [sys.executable, "-m", "asyncpar", "launch", "--nproc-per-node", "2", *ranks]
    by_mpiexec = [*mpiexec[:-3], "2", sys.executable, *ranks]
    figures = []
    for command in (launch, by_mpiexec):
        [output] = outputs_of(command, home=tmp_path)
        figures.append(json.loads(next(line for line in output.splitlines() if line.startswith("{"))))
    launched, placed = figures
    assert placed["engine"].startswith("mpiexec")
    assert [placed[name] for name in LOSSES] == [launched[name] for name in LOSSES]
