"""Functions on nodes of Slurm, with real daemons; `scripts/test-slurm` runs them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import asyncpar as ap
from asyncpar.engines import streamed_places
from asyncpar.testing import engine_programs as programs
from asyncpar.testing.engines import EngineConformance, EngineOutput
from tests.engines.consoles import RecordingConsole
from tests.launchers.slurm_cluster import SlurmCluster, has_ended, is_unpacked

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not is_unpacked(), reason="scripts/test-slurm unpacks Slurm and runs these"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture(autouse=True)
def _at_home(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a user of the cluster."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(cluster.home)


async def launch(
    function: Callable[..., Any], *arguments: Any, ranks: Any, output: EngineOutput | None = None, **options: Any
) -> list[Any]:
    return await ap.slurm.launch(function, *arguments, ranks=ranks, console=RecordingConsole(output), **options)


class TestSlurm(EngineConformance):
    async def launch(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        ranks: int,
        output: EngineOutput | None = None,
        **options: Any,
    ) -> list[Any]:
        return await launch(function, *arguments, ranks=ranks, output=output, per_node=2, **options)


async def rank_in(folder: Path, launching: asyncio.Future[Any]) -> int:
    """Return the process that ``linger`` has named."""
    while not (found := os.listdir(folder)):
        assert not launching.done(), launching
        await asyncio.sleep(0.05)
    return int(found[0])


def agent_of(rank: int) -> psutil.Process:
    return next(one for one in psutil.Process(rank).parents() if "asyncpar.engines.slurm_place" in one.cmdline())


async def test_a_node_whose_agent_is_killed_is_lost_and_all_nodes_are_given_back(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    launching = asyncio.ensure_future(launch(programs.linger, str(tmp_path), ranks=2))
    rank = await rank_in(tmp_path, launching)
    agent_of(rank).kill()
    with pytest.raises(ExceptionGroup) as failed:
        await launching
    assert isinstance(failed.value.exceptions[0], ap.PeerLost)
    assert "died (" in str(failed.value)
    assert "Killed" in str(failed.value)
    await asyncio.to_thread(cluster.wait_idle)
    await asyncio.to_thread(cluster.until, lambda: has_ended(rank), "the end of the rank")


async def test_a_node_that_gives_no_sign_of_life_is_lost(
    cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed_places, "LEASE_SECONDS", 10.0)
    monkeypatch.setattr(streamed_places, "_END_SECONDS", 8.0)
    launching = asyncio.ensure_future(launch(programs.linger, str(tmp_path), ranks=1))
    rank = await rank_in(tmp_path, launching)
    agent_of(rank).send_signal(signal.SIGSTOP)
    with pytest.raises(ExceptionGroup) as failed:
        await launching
    assert "gives no answer within 10 s" in str(failed.value)
    await asyncio.to_thread(cluster.wait_idle)
    await asyncio.to_thread(cluster.until, lambda: has_ended(rank), "the end of the rank")


async def test_a_job_that_slurm_cancels_says_so(cluster: SlurmCluster, tmp_path: Path) -> None:
    launching = asyncio.ensure_future(launch(programs.linger, str(tmp_path), ranks=2))
    await rank_in(tmp_path, launching)
    await asyncio.to_thread(cluster.run, "scancel", "--me")
    with pytest.raises(ExceptionGroup) as failed:
        await launching
    assert "Slurm" in str(failed.value) or "CANCELLED" in str(failed.value)
    await asyncio.to_thread(cluster.wait_idle)


async def test_more_nodes_than_there_are_are_refused_in_the_words_of_slurm() -> None:
    with pytest.raises(ap.UsageError, match=r"ranks: Slurm has no nodes for 9, 1 on each of 9: .*allocation failure"):
        await launch(programs.add, 1, 2, ranks=9)
    with pytest.raises(ap.UsageError, match="nowhere"):
        await launch(programs.add, 1, 2, ranks=1, salloc=["--partition=nowhere"])


async def test_nodes_that_others_hold_are_waited_for_and_not_for_ever(cluster: SlurmCluster, tmp_path: Path) -> None:
    holding = asyncio.ensure_future(launch(programs.linger, str(tmp_path), ranks=3, salloc=["--exclusive"]))
    await rank_in(tmp_path, holding)
    with pytest.raises(ap.UsageError, match=r"Slurm has not given 1 nodes within 2 s .*others hold them"):
        await launch(programs.add, 1, 2, ranks=1, timeout=1.0, wait=1.0)
    waiting = asyncio.ensure_future(launch(programs.add, 1, 2, ranks=3, wait=60.0))
    await asyncio.to_thread(cluster.until, lambda: "PENDING" in cluster.run("squeue", "-h", "-o", "%T"), "the queue")
    holding.cancel()
    assert await waiting == [3, 1003, 2003]


async def test_a_python_that_nodes_lack_is_named() -> None:
    with pytest.raises(ap.LaunchError, match=r"Slurm's node 127\.0\.0\.1 cannot run asyncpar: .*/no/python"):
        await launch(programs.add, 1, 2, ranks=1, python="/no/python")


async def test_bounds_for_an_elastic_job_are_refused_in_words() -> None:
    with pytest.raises(ap.UsageError, match=r"ranks: expected a number, as this engine's places are fixed, got \(1, 2"):
        await launch(programs.add, 1, 2, ranks=(1, 2))


WITHIN = """
import asyncpar as ap
from asyncpar.testing import engine_programs as programs

if __name__ == "__main__":
    seen = ap.slurm.run(programs.describe, ranks=4, per_node=2)
    print([(one["GROUP_RANK"], one["LOCAL_RANK"], one["sum"]) for one in seen])
    try:
        ap.slurm.run(programs.add, 1, 2, ranks=5, per_node=2)
    except ap.UsageError as error:
        print(error)
"""


def test_a_batch_script_runs_functions_on_the_nodes_of_its_job(cluster: SlurmCluster) -> None:
    (cluster.home / "within.py").write_text(WITHIN)
    script = cluster.home / "within.sh"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} within.py\n")
    job = cluster.run("sbatch", "--parsable", "-N2", "--ntasks-per-node=2", str(script)).strip()
    assert cluster.finish(job) == "COMPLETED", cluster.output(job)
    ranks, refused = cluster.output(job).splitlines()[-2:]
    assert ranks == str([(0, 0, 6), (0, 1, 6), (1, 0, 6), (1, 1, 6)])
    assert refused.startswith(f"ranks: expected at most 4, 2 on each of the 2 nodes of Slurm's job {job}, got 5")


CALLER = """
import sys
import asyncpar as ap
from asyncpar.testing import engine_programs as programs

if __name__ == "__main__":
    ap.slurm.run(programs.linger, sys.argv[1], ranks=2)
"""


def test_nothing_is_left_of_a_caller_that_is_killed(cluster: SlurmCluster, tmp_path: Path) -> None:
    (cluster.home / "caller.py").write_text(CALLER)
    with subprocess.Popen(
        [sys.executable, "caller.py", str(tmp_path)], env=os.environ | cluster.environment, stderr=subprocess.DEVNULL
    ) as caller:
        cluster.until(lambda: len(os.listdir(tmp_path)) == 2, "two ranks")
        steps = [one.pid for one in psutil.Process(caller.pid).children(recursive=True)]
        caller.kill()
    ranks = [int(name) for name in os.listdir(tmp_path)]
    cluster.until(lambda: all(map(has_ended, ranks)), "the end of the ranks")
    cluster.until(lambda: all(map(has_ended, steps)), "the end of the steps")
    cluster.wait_idle()
