"""Programs for torch under `torchrun` and `asyncpar launch`: worlds form again and again, missing ranks are named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.soak import first

pytestmark = [pytest.mark.process, pytest.mark.timeout(150)]

LIMIT = 120.0

PROGRAM = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
import asyncpar.torch

torch.set_num_threads(1)
lines, tables = [], []

def worlds(method, count):
    for _ in range(count):
        dist.init_process_group("asyncpar", init_method=method, timeout=timedelta(seconds=30))
        rank, size = dist.get_rank(), dist.get_world_size()
        x = torch.full((3,), rank + 1.0)
        dist.all_reduce(x)
        lines.append(f"rank {rank} of {size}: {method} {x.tolist()}")
        group = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        tables.append(group.communicator.algorithm_table().splitlines()[-1])
        dist.barrier()
        dist.destroy_process_group()
    return rank, size

rank, size = worlds("env://", 2)
worlds("asyncpar://", 1)
try:
    seconds = timedelta(seconds=1)
    dist.init_process_group("asyncpar", init_method="asyncpar://", rank=rank, world_size=size + 1, timeout=seconds)
except dist.DistBackendError as error:
    lines.append(str(error))
open(sys.argv[1] + f"/{rank}", "w").write("\\n".join([*lines, *tables]))
"""


LOSS = """
import os, signal, sys
import torch, torch.distributed as dist
from asyncpar.torch.rendezvous.rendezvous import StoreRendezvous

rank, where = int(os.environ["RANK"]), sys.argv[2]

def end_here(*_):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

if rank == 1 and where == "rendezvous":  # where all have come to
    StoreRendezvous.exchange = end_here
try:
    dist.init_process_group("asyncpar", init_method="asyncpar://")
    dist.barrier()
    end_here()
    dist.recv(torch.zeros(3), 2 - rank)  # of a rank that lives
except dist.DistBackendError as error:
    open(sys.argv[1] + f"/{rank}", "w").write(f"{type(error).__name__} of {error.rank}")
    raise
"""


def start(launcher: Sequence[str], directory: Path, source: str, *arguments: str, **settings: str) -> tuple[int, str]:
    """Run the program ``source``, with ``settings`` in its environment, and return its exit code and output."""
    program = directory / "program.py"
    program.write_text(source)
    dropped = ("ASYNCPAR_", "COV", "PYTEST", "RANK", "WORLD_SIZE", "MASTER_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    process = subprocess.Popen(
        [sys.executable, "-m", *launcher, str(program), str(directory), *arguments],
        env=environment | {"OMP_NUM_THREADS": "1"} | settings,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return process.returncode, output


def run(launcher: Sequence[str], directory: Path, **settings: str) -> list[list[str]]:
    """Run the program in two ranks and return what each wrote."""
    status, output = start(launcher, directory, PROGRAM, **settings)
    assert status == 0, output
    assert "Traceback" not in output
    return [(directory / str(rank)).read_text().splitlines() for rank in range(2)]


def expected(rank: int) -> list[str]:
    return [
        *[f"rank {rank} of 2: env:// [3.0, 3.0, 3.0]"] * 2,
        f"rank {rank} of 2: asyncpar:// [3.0, 3.0, 3.0]",
        f"rank {rank}: rank 2 of 3 has not come within 1.0 s",
    ]


@pytest.mark.parametrize(
    ("launcher", "calibrates", "source"),
    [
        pytest.param(["asyncpar", "launch", "--nproc-per-node", "2"], "on", "measured", id="asyncpar launch"),
        pytest.param(
            ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"], "off", "built in", id="torchrun"
        ),
    ],
)
def test_worlds_form_again_and_again_and_missing_ranks_are_named(
    launcher: list[str], calibrates: str, source: str, tmp_path: Path
) -> None:
    """Lanes are measured as ranks meet if that is switched on."""
    settings = {"ASYNCPAR_CALIBRATE": calibrates, "XDG_CACHE_HOME": str(tmp_path)}
    for rank, lines in enumerate(run(launcher, tmp_path, **settings)):
        assert lines[:3] == expected(rank)[:3]
        assert lines[3].startswith(expected(rank)[3])
        assert [table.endswith(source) for table in lines[4:]] == [True] * 3, lines


@pytest.mark.parametrize("where", first(1, ["rendezvous", "recv"]))
def test_survivors_of_a_killed_rank_get_peer_lost_before_the_launcher_ends_them(where: str, tmp_path: Path) -> None:
    """They wait for a rank that lives: only the agent notifies them in time."""
    status, output = start(["asyncpar", "launch", "--nproc-per-node", "3"], tmp_path, LOSS, where)
    assert status == 137, output
    outcomes = {rank: (tmp_path / str(rank)).read_text() for rank in range(3) if (tmp_path / str(rank)).exists()}
    assert outcomes == {0: "PeerLost of 1", 2: "PeerLost of 1"}, output
