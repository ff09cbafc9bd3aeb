"""ASYNCPAR_CALIBRATE: ranks measure their lanes as they meet, and the next job goes by what was kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch.conftest import Launcher
from tests.soak import is_soak

pytestmark = pytest.mark.process

PROGRAM = """
import asyncpar as ap

async def main():
    async with ap.init() as node:
        print(f"of {node.rank}: {node.world.algorithm_table().splitlines()[-1]}")
        await node.world.barrier()

ap.run(main())
"""
ALONE = "import asyncpar.blocking\n\nwith asyncpar.blocking.init() as node:\n    print(node.world.algorithm_table())\n"


def lanes_of(launcher: Launcher, setting: str, cache: Path) -> set[str]:
    """Return what the ranks of a job say of their lanes."""
    env = {"ASYNCPAR_CALIBRATE": setting, "XDG_CACHE_HOME": str(cache)}
    done = launcher.run("--nproc-per-node", "2", "--transport", "tcp", "job.py", env=env)
    assert done.returncode == 0, done.stderr
    return {line.partition("lanes: ")[2] for line in done.stdout.splitlines() if "lanes: " in line}


def test_lanes_are_measured_as_ranks_meet_and_kept_for_the_next_job(launcher: Launcher, tmp_path: Path) -> None:
    (launcher.directory / "job.py").write_text(PROGRAM)
    cache = tmp_path / "cache"
    if is_soak():
        [built_in] = lanes_of(launcher, "off", cache)
        assert built_in.endswith("built in")
        assert not cache.exists()
    [measured] = lanes_of(launcher, "on", cache)
    assert measured.endswith("measured")
    path = cache / "asyncpar" / "lanes.json"
    content = json.loads(path.read_text())
    [lane] = content["lanes"].values()
    lane |= {"latency": 123e-6, "bandwidth": 4.5e9, "together": 6e9}
    path.write_text(json.dumps(content))
    [kept] = lanes_of(launcher, "on", cache)
    assert kept == "4.5 GB/s, 123 us, 6 GB/s together, measured"


def test_a_rank_alone_has_no_lanes(launcher: Launcher, tmp_path: Path) -> None:
    (launcher.directory / "job.py").write_text(ALONE)
    env = {"ASYNCPAR_CALIBRATE": "on", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = launcher.run("--nproc-per-node", "1", "job.py", env=env)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "cache").exists()
