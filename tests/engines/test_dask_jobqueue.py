"""Ranks on workers that jobs of a batch system are: clusters of dask-jobqueue, whose jobs are processes here."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import asyncpar as ap
from asyncpar.testing import engine_programs as programs
from tests.engines.consoles import RecordingConsole
from tests.engines.jobqueue import import_jobqueue

distributed = pytest.importorskip("distributed", reason="distributed (extra dask) is not installed")
jobqueue = import_jobqueue("dask_jobqueue.local")

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(240),
    # of the processes that are jobs, which dask-jobqueue kills and does not wait for
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Any]:
    """A cluster whose workers come when it is scaled."""
    with jobqueue.LocalCluster(
        cores=1,
        processes=1,
        memory="1GB",
        python=sys.executable,
        local_directory=str(tmp_path),
        scheduler_options={"dashboard_address": "127.0.0.1:0", "host": "127.0.0.1"},
    ) as cluster:
        yield cluster


@pytest.mark.soak
def test_a_job_waits_for_workers_that_are_asked_for_and_more_of_them_take_more_ranks(cluster: Any) -> None:
    with distributed.Client(cluster) as client:
        with pytest.raises(ap.UsageError, match=r"expected at most 0, 1 on each of 0 workers of Dask, got 2; wait="):
            ap.dask.run(client, programs.add, 1, 2, ranks=2)
        cluster.scale(jobs=2)
        seen = ap.dask.run(client, programs.describe, ranks=2, wait=120.0, console=RecordingConsole())
        assert [(one["rank"], one["GROUP_RANK"], one["sum"]) for one in seen] == [(0, 0, 1), (1, 1, 1)]


def test_its_import_leaves_ctrl_c_alone() -> None:
    assert getattr(signal.getsignal(signal.SIGINT), "__module__", None) != "dask_jobqueue.runner"
