"""asyncpar on systems that lack what Linux has: macOS without its own calls, Windows without POSIX."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.soak import first

ROOT = Path(__file__).parents[2]
INTERPRETER = Path(__file__).with_name("interpreter")

SUITE = (
    "tests/blocking/test_pending.py",
    "tests/collectives/test_conformance.py::TestTcp",
    "tests/core/test_descriptors.py",
    "tests/core/test_private_files.py",
    "tests/net/transport/test_lanes.py::TestTcpLane",
    "tests/test_node.py",
)
"""What runs on a system without Linux's own calls; over TCP, for there are no Unix sockets of ours and no arena."""

IN_PROCESS = """
import asyncio, threading
import numpy as np
import asyncpar as ap

class Counter(ap.Actor):
    def __init__(self) -> None:
        self.count = 0

    @ap.endpoint
    async def add(self, number: int) -> int:
        self.count += number
        return self.count

async def alone():
    async with ap.init() as node:
        counter = await node.spawn(Counter)
        return float((await node.world.all_reduce(np.ones(3)))[0]) + await counter.add(2)

async def together(transport="inproc"):
    async with ap.testing.local_world(3, transport=transport) as nodes:
        sums = await asyncio.gather(*(node.world.all_reduce(np.full(2, node.rank)) for node in nodes))
        return [float(total[0]) for total in sums]

async def simulated(node):
    return float((await node.world.all_reduce(np.ones(1)))[0])

def blocking():
    with ap.testing.blocking_world(2) as nodes:
        sums = [None, None]
        def reduce(rank):
            sums[rank] = float(nodes[rank].world.all_reduce(np.ones(2))[0])
        threads = [threading.Thread(target=reduce, args=(rank,)) for rank in range(2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        return sums

print(ap.run(alone))
print(asyncio.run(together()), asyncio.run(together("tcp")), ap.testing.run_virtual(together()))
print(ap.testing.simulate(simulated, size=3, seed=1).results)
print(blocking())
with ap.blocking.init() as node:
    print(float(node.world.all_reduce(np.ones(2))[0]))
"""
DONE = """3.0
[3.0, 3.0, 3.0] [3.0, 3.0, 3.0] [3.0, 3.0, 3.0]
{0: 3.0, 1: 3.0, 2: 3.0}
[2.0, 2.0]
1.0
"""
IMPORTS = """
import importlib, pkgutil
import asyncpar

OTHERS = ("dask", "jax", "ray", "torch")  # whose own packages would not start here
for name in asyncpar.__all__:
    if name not in OTHERS:
        getattr(asyncpar, name)
for module in pkgutil.walk_packages(asyncpar.__path__, "asyncpar.", onerror=print):
    if not module.name.endswith("__main__") and not any(name in module.name for name in OTHERS):
        importlib.import_module(module.name)
"""
JOB = """
import numpy as np
import asyncpar as ap

async def main():
    async with ap.init() as node:
        total = await node.world.all_reduce(np.full(300_000, float(node.rank + 1)))
        print("rank", node.rank, "of", node.size, "has", total[0], "over", node.links.lane_kind(1 - node.rank))

ap.run(main)
"""


def run(system: str, *arguments: str, directory: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a Python to which this system looks like ``system``."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ASYNCPAR_", "COV_", "PYTEST_"))}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=clean | {"PYTHONPATH": str(INTERPRETER), "SYSTEM_TO_BE": system},
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )


@pytest.mark.process
@pytest.mark.parametrize("system", first(1, ["darwin", "win32"]))
def test_worlds_in_a_process_work(system: str) -> None:
    done = run(system, "-W", "error", "-c", IN_PROCESS)

    assert (done.stdout, done.returncode) == (DONE, 0), done.stderr


@pytest.mark.process
@pytest.mark.parametrize("system", first(1, ["win32", "darwin"]))
def test_every_module_can_be_imported(system: str) -> None:
    done = run(system, "-c", IMPORTS)

    assert (done.stderr, done.returncode) == ("", 0)


@pytest.mark.process
def test_a_launcher_without_calls_of_linux_runs_its_ranks_over_tcp(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)

    done = run("darwin", "-m", "asyncpar", "launch", "--nproc-per-node", "2", "job.py", directory=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2 has 3.0 over tcp" in done.stdout + done.stderr
    assert "rank 1 of 2 has 3.0 over tcp" in done.stdout + done.stderr


@pytest.mark.soak
@pytest.mark.process
def test_a_launcher_without_calls_of_linux_reports_a_failure(tmp_path: Path) -> None:
    script = textwrap.dedent(JOB).replace("total[0]", "total[0] / (node.rank - 1)")
    (tmp_path / "job.py").write_text("import numpy\nnumpy.seterr(divide='raise')\n" + script)
    launch = ("-m", "asyncpar", "launch", "--nproc-per-node", "2", "--post-mortem", "kept", "job.py")

    done = run("darwin", *launch, directory=tmp_path)

    assert done.returncode == 1
    assert "FloatingPointError: divide by zero" in done.stderr
    assert "rank 1" in next((tmp_path / "kept").glob("*/summary.txt")).read_text()


@pytest.mark.process
@pytest.mark.parametrize("command", first(1, [("launch", "job.py"), ("agent",)]), ids=" ".join)
def test_a_launcher_on_a_system_without_groups_of_processes_says_where_to_start_it(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text(JOB)

    done = run("win32", "-m", "asyncpar", *command, directory=tmp_path)

    assert done.returncode == 2
    assert "win32 has not; on Windows start them in WSL" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.soak
@pytest.mark.process
def test_a_part_of_this_suite_passes_without_calls_of_linux() -> None:
    done = run(
        "darwin", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "not shm", *SUITE
    )

    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
