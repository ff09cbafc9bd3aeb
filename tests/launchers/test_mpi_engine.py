"""Functions where the ``mpiexec`` of three MPIs starts processes; `scripts/test-backends` installs them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import asyncpar as ap
from asyncpar.testing import engine_programs as programs
from asyncpar.testing.engines import EngineConformance, EngineOutput
from tests.backends.extras import environment, need_program
from tests.engines.consoles import RecordingConsole
from tests.launchers.test_mpiexec import PROGRAMS
from tests.soak import first

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

HOSTS = ("localhost", "127.0.0.1")
PATIENCE = 60.0


@pytest.fixture(name="mpiexec", params=PROGRAMS, autouse=True)
def find_mpiexec(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the program; what it needs of an environment, also for root, is there."""
    for name, text in environment(tmp_path).items():
        monkeypatch.setenv(name, text)
    return need_program(PROGRAMS[request.param], "scripts/test-backends installs it")


@pytest.mark.parametrize("mpiexec", first(1, PROGRAMS), indirect=True)
class TestMpi(EngineConformance):
    """The suite of engines: with one MPI, as the place that ``mpiexec`` starts is the same; with all by ``--soak``."""

    @pytest.fixture(autouse=True)
    def _use(self, mpiexec: str) -> None:
        self.mpiexec = mpiexec

    async def launch(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        ranks: int,
        output: EngineOutput | None = None,
        **options: Any,
    ) -> list[Any]:
        return await ap.mpi.launch(
            function,
            *arguments,
            ranks=ranks,
            hosts=HOSTS,
            mpiexec=self.mpiexec,
            console=RecordingConsole(output),
            **options,
        )


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def until(is_so: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(PATIENCE):
        while not is_so():  # noqa: ASYNC110  # other processes do it
            await asyncio.sleep(0.05)
    assert is_so(), what


async def test_a_host_whose_agent_is_killed_is_lost_with_its_ranks(mpiexec: str, tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    launching = asyncio.ensure_future(
        ap.mpi.launch(programs.linger, str(folder), ranks=1, mpiexec=mpiexec, console=RecordingConsole())
    )
    await until(lambda: launching.done() or bool(os.listdir(folder)), "a rank")
    assert not launching.done(), launching
    rank = int(os.listdir(folder)[0])
    next(one for one in psutil.Process(rank).parents() if "asyncpar.engines.mpi_place" in one.cmdline()).kill()
    with pytest.raises(ExceptionGroup) as failed:
        await launching
    assert isinstance(failed.value.exceptions[0], ap.PeerLost)
    assert "mpiexec's host died (" in str(failed.value)
    await until(lambda: not is_running(rank), "the end of the rank")


def test_ranks_may_run_on_all_cores(mpiexec: str) -> None:
    def cores() -> int:
        return len(os.sched_getaffinity(0))

    found = ap.mpi.run(cores, ranks=2, mpiexec=mpiexec, pickle=True, console=RecordingConsole())
    assert found == [len(os.sched_getaffinity(0))] * 2


def test_large_arguments_and_results_travel(mpiexec: str) -> None:
    x = np.arange(1 << 20, dtype=np.float64)
    [y] = ap.mpi.run(lambda x: x + 1.0, x, ranks=1, mpiexec=mpiexec, pickle=True, console=RecordingConsole())
    assert (y == x + 1.0).all()


CALLER = """
import sys
import asyncpar as ap
from asyncpar.testing import engine_programs as programs

ap.mpi.run(programs.linger, sys.argv[1], ranks=2, mpiexec=sys.argv[2])
"""


@pytest.mark.parametrize(
    "mpiexec",
    [
        pytest.param(name, marks=[pytest.mark.soak] if name == "Open MPI" else [])  # its places end with their lease
        for name in PROGRAMS
    ],
    indirect=True,
)
def test_nothing_is_left_of_a_caller_that_is_killed(mpiexec: str, tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    deadline = time.monotonic() + PATIENCE
    with subprocess.Popen([sys.executable, "-c", CALLER, str(folder), mpiexec], stderr=subprocess.DEVNULL) as caller:
        while len(os.listdir(folder)) < 2:
            assert caller.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        caller.kill()
    ranks = [int(name) for name in os.listdir(folder)]
    while any(map(is_running, ranks)):
        assert time.monotonic() < deadline + PATIENCE
        time.sleep(0.05)
