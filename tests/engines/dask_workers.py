"""Workers and schedulers of Dask that differ from the caller: processes with what a folder has in front of all else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def start_cluster(workers: int) -> Iterator[Any]:
    """Start a cluster of this machine, whose nannies may take their time to replace a worker that is killed."""
    import dask
    import distributed

    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "120s"}),
        dask.config.set(
            {"distributed.worker.profile.enabled": False}
        ),  # which looks at all threads, a hundred times a second
        distributed.LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,
    ):
        yield cluster


def wait_for_workers(client: Any, dead: Collection[str] = ()) -> None:
    """Wait until there are two workers: nannies, or the cluster, have replaced the ``dead`` ones.

    A nanny whose worker dies before it has heard of its start ends, too; the cluster replaces it when it is told its
    size.
    """
    deadline = time.monotonic() + 60.0
    while len(found := find_workers(client)) != 2 or found & set(dead):
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
        client.cluster.scale(2)


def find_workers(client: Any) -> set[str]:
    """Return the addresses of the workers that the scheduler knows."""
    return set(client.scheduler_info(n_workers=-1)["workers"])


@contextmanager
def start_worker(client: Any, folder: Path, *options: str) -> Iterator[str]:
    """Start a worker that imports from ``folder`` first, and wait until it runs; yields its address."""
    command = [sys.executable, "-m", "dask", "worker", client.scheduler.address, "--no-nanny", "--no-dashboard"]
    command += ["--nthreads", "1", "--name", folder.name, "--local-directory", str(folder), *options]
    with _start(command, folder) as worker:
        deadline = time.monotonic() + 60.0
        while not (found := _find_worker(client, folder.name)):
            assert worker.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield found


@contextmanager
def start_scheduler(folder: Path) -> Iterator[str]:
    """Start a scheduler that imports from ``folder`` first; yields its address."""
    file = folder / "scheduler.json"
    command = [
        sys.executable,
        "-m",
        "dask",
        "scheduler",
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--no-dashboard",
    ]
    with _start([*command, "--scheduler-file", str(file)], folder) as scheduler:
        deadline = time.monotonic() + 60.0
        while not (file.exists() and file.read_text().endswith("}")):
            assert scheduler.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield json.loads(file.read_text())["address"]


@contextmanager
def _start(command: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,  # python -m imports from there
            env=os.environ | {"PYTHONPATH": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def write_other_asyncpar(folder: Path, source: str, version: str = "9.9") -> None:
    """Write another package asyncpar, as it would be installed."""
    (folder / "asyncpar").mkdir()
    (folder / "asyncpar" / "__init__.py").write_text(source)
    installed = folder / f"asyncpar-{version}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: asyncpar\nVersion: {version}\n")


def _find_worker(client: Any, name: str) -> str | None:
    workers = client.scheduler_info(n_workers=-1)["workers"]
    running = {str(worker["name"]): address for address, worker in workers.items() if worker["status"] == "running"}
    return running.get(name)
