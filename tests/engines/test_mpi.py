"""Functions where ``mpiexec`` starts processes, with a program of ours in its place: each host is this machine.

`scripts/test-backends` does the same with MPICH, Open MPI and Intel MPI.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import asyncpar as ap
from asyncpar.engines import mpi_engine
from asyncpar.testing import engine_programs as programs
from asyncpar.testing.engines import EngineConformance, EngineOutput
from tests.engines.consoles import RecordingConsole

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

HOSTS = ("localhost", "127.0.0.1")
MPIEXEC = """#!/bin/sh
while true; do
    case "$1" in
    -n | -host) shift 2 ;;
    -*) shift ;;
    *) break ;;
    esac
done
export PMI_RANK=0 PMI_SIZE=1 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1
echo "mpiexec: welcome"
"$@" || { code=$?; echo; echo "=   ONE PROCESS ENDED WITH CODE $code"; exit $code; }
"""


@pytest.fixture(autouse=True)
def _mpiexec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mpiexec").write_text(MPIEXEC)
    (tmp_path / "mpiexec").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


class TestMpi(EngineConformance):
    async def launch(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        ranks: int,
        output: EngineOutput | None = None,
        **options: Any,
    ) -> list[Any]:
        return await ap.mpi.launch(
            function, *arguments, ranks=ranks, hosts=HOSTS, console=RecordingConsole(output), **options
        )


def test_a_blocking_run_fills_the_hosts_that_it_needs_and_hides_the_world_of_mpi_from_ranks() -> None:
    def look() -> tuple[str, list[str]]:
        return os.environ["GROUP_RANK"], [name for name in os.environ if name.startswith(("PMI_", "MPI_LOCAL"))]

    seen = ap.mpi.run(look, hosts=HOSTS, ranks=3, pickle=True, console=RecordingConsole())
    assert seen == [("0", []), ("0", []), ("1", [])]


@pytest.mark.soak
def test_a_place_of_mpi_takes_as_many_ranks_as_are_ordered() -> None:
    seen = ap.mpi.run(programs.describe, hosts=HOSTS, ranks=2, per_place=2, console=RecordingConsole())
    assert [one["GROUP_RANK"] for one in seen] == [0, 0]


async def test_a_host_that_starts_nothing_says_so_in_the_words_of_mpiexec() -> None:
    words = r"mpiexec's host localhost cannot run asyncpar: .*mpiexec: welcome.*ONE PROCESS ENDED WITH CODE 127"
    with pytest.raises(ap.LaunchError, match=words):
        await ap.mpi.launch(programs.add, 1, 2, ranks=1, hosts=["localhost"], python="/no/python")


async def test_what_cannot_be_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(**options: Any) -> str:
        with pytest.raises(ap.UsageError) as error:
            await ap.mpi.launch(programs.add, 1, 2, **{"ranks": 1, **options})
        return str(error.value)

    assert await refused(hosts="node-1") == "hosts: expected a list of names, got 'node-1'; pass ['node-1']"
    assert "hosts: there is no way to 'no.such.host' from here" in await refused(hosts=["no.such.host"])
    assert "ranks: expected at most 2, 1 on each of 2 hosts, got 3" in await refused(ranks=3, hosts=HOSTS, per_place=1)
    assert "mpiexec: expected a program" in await refused(mpiexec=[])
    assert "mpiexec: /no/mpiexec is not in PATH" in await refused(mpiexec=["/no/mpiexec", "-verbose"])
    assert "elastic jobs run with ap.cluster on this machine, with ap.dask" in await refused(ranks=(1, 2))


def test_hosts_elsewhere_get_an_address_that_they_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"localhost": "127.0.0.1", "far": "192.0.2.7"}
    monkeypatch.setattr(mpi_engine, "resolve", addresses.__getitem__)
    monkeypatch.setattr(mpi_engine, "route_to", lambda address: f"way to {address}")
    own_address = mpi_engine._own_address  # noqa: SLF001  # what places are told is not seen on one machine
    assert own_address([""]) == "127.0.0.1"
    assert own_address(["localhost"]) == "127.0.0.1"
    assert own_address(["localhost", "far"]) == "way to 192.0.2.7"
