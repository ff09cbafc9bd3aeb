"""Workers of Dask that differ from the caller: processes of their own, with what a folder has in front of all else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def start_worker(client: Any, folder: Path, *options: str) -> Iterator[str]:
    """Start a worker that imports from ``folder`` first, and wait until the scheduler knows it; yields its address."""
    command = [sys.executable, "-m", "dask", "worker", client.scheduler.address, "--no-nanny", "--no-dashboard"]
    command += ["--nthreads", "1", "--name", folder.name, "--local-directory", str(folder), *options]
    with (folder / "worker.log").open("wb") as log:
        worker = subprocess.Popen(
            command,
            cwd=folder,  # python -m imports from there
            env=os.environ | {"PYTHONPATH": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + 60.0
        while not (found := _find_worker(client, folder.name)):
            assert worker.poll() is None, (folder / "worker.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield found
    finally:
        worker.kill()
        worker.wait()


def write_other_asyncpar(folder: Path, source: str, version: str = "9.9") -> None:
    """Write another package asyncpar, as it would be installed."""
    (folder / "asyncpar").mkdir()
    (folder / "asyncpar" / "__init__.py").write_text(source)
    installed = folder / f"asyncpar-{version}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: asyncpar\nVersion: {version}\n")


def _find_worker(client: Any, name: str) -> str | None:
    workers = client.scheduler_info(n_workers=-1)["workers"]
    return next((address for address, worker in workers.items() if str(worker["name"]) == name), None)
