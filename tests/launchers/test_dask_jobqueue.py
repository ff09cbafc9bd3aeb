"""Ranks on workers of Dask that are jobs of a real Slurm, by dask-jobqueue; `scripts/test-slurm` runs them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import asyncpar as ap
from asyncpar.testing import engine_programs as programs
from tests.engines.consoles import RecordingConsole
from tests.engines.jobqueue import import_jobqueue
from tests.launchers.slurm_cluster import SlurmCluster, is_unpacked

distributed = pytest.importorskip("distributed", reason="distributed (extra dask) is not installed")
jobqueue = import_jobqueue("dask_jobqueue")

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not is_unpacked(), reason="scripts/test-slurm unpacks Slurm and runs these"),
]


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as made:
        for name, value in made.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(made.home)
        yield made


@pytest.fixture
def workers(slurm: SlurmCluster) -> Iterator[Any]:
    """A cluster of Dask with a job of Slurm for each worker."""
    with jobqueue.SLURMCluster(
        cores=1,
        processes=1,
        memory="1GB",
        python=sys.executable,
        job_directives_skip=["--mem"],  # these nodes tell of no memory
        local_directory=str(slurm.home),
        log_directory=str(slurm.home),
        scheduler_options={"dashboard_address": "127.0.0.1:0", "host": "127.0.0.1"},
    ) as cluster:
        yield cluster


async def test_ranks_run_on_jobs_of_slurm_and_one_that_is_cancelled_is_a_lost_rank(
    slurm: SlurmCluster, workers: Any
) -> None:
    folder = slurm.home / "ranks"
    folder.mkdir()
    with distributed.Client(workers) as client:
        workers.scale(jobs=2)
        seen = await ap.dask.launch(client, programs.describe, ranks=2, wait=120.0, console=RecordingConsole())
        assert [(one["rank"], one["GROUP_RANK"], one["sum"]) for one in seen] == [(0, 0, 1), (1, 1, 1)]
        launching = asyncio.ensure_future(
            ap.dask.launch(client, programs.linger, str(folder), ranks=2, console=RecordingConsole())
        )
        async with asyncio.timeout(60):
            while len(os.listdir(folder)) < 2:
                assert not launching.done(), launching
                await asyncio.sleep(0.05)
        job = slurm.run("squeue", "-h", "-o", "%i").split()[0]
        await asyncio.to_thread(slurm.run, "scancel", job)
        with pytest.raises(ExceptionGroup) as failed:
            await launching
    assert isinstance(failed.value.exceptions[0], ap.PeerLost), failed.value
    assert "is lost: Dask's worker tcp://" in str(failed.value)
