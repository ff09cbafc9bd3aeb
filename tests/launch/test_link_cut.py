"""The wire between two hosts is cut under a running job: for a moment, which it outlives, and then for good."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.process
Launcher = Any  # the class lives in conftest.py
Eventually = Callable[[Callable[[], bool]], None]

LIMIT = 5.0
"""Seconds without anything after which a peer is lost: ASYNCPAR_LINK_TIMEOUT."""

STEPS = """
    import asyncio, numpy as np, asyncpar as ap
    register()
    async def main():
        async with ap.init() as node:
            longest, steps, last = 0.0, 0, time.monotonic()
            try:
                while True:
                    x = np.full(20_000, rank + 1.0)
                    await node.world.all_reduce(x)
                    assert (x == 3).all()
                    steps, longest, last = steps + 1, max(longest, time.monotonic() - last), time.monotonic()
                    with open(f"new-{rank}", "w") as file:
                        json.dump(dict(steps=steps, longest=longest), file)
                    os.replace(f"new-{rank}", f"steps-{rank}")
                    await asyncio.sleep(0.02)
            except ap.PeerLost as error:
                with open(f"new-{rank}", "w") as file:
                    json.dump(dict(kind=type(error).__name__, text=str(error)), file)
                os.replace(f"new-{rank}", f"error-{rank}")
                raise
    ap.run(main)
"""


@pytest.mark.soak
@pytest.mark.timeout(90)
@pytest.mark.parametrize("lane", ["tcp", "grpc"])
def test_a_job_outlives_a_short_cut_and_names_the_peer_after_a_long_one(
    launcher: Launcher, namespaces: tuple[str, str], eventually: Eventually, tmp_path: Path, lane: str
) -> None:
    (tmp_path / "secret").write_bytes(os.urandom(32))
    (tmp_path / "secret").chmod(0o600)
    script = launcher.script(STEPS)
    common = ("--nnodes", "2", "--rdzv-endpoint", "10.213.7.1:29400", "--secret-file", "secret")
    env = {"ASYNCPAR_TRANSPORT": lane, "ASYNCPAR_LINK_TIMEOUT": str(round(LIMIT))}
    follower, leader = (
        launcher.start(*common, "--node-rank", str(rank), script, prefix=("ip", "netns", "exec", name), env=env)
        for rank, name in reversed(list(enumerate(namespaces)))
    )

    def step_of(rank: int) -> dict[str, float]:
        path = tmp_path / f"steps-{rank}"
        return dict(json.loads(path.read_text())) if path.exists() else {"steps": 0, "longest": 0.0}

    def turn(state: str) -> None:
        command = ["ip", "-n", namespaces[0], "link", "set", namespaces[0], state]
        subprocess.run(command, check=True, capture_output=True)

    eventually(lambda: min(step_of(0)["steps"], step_of(1)["steps"]) > 10)
    turn("down")
    time.sleep(0.4 * LIMIT)
    turn("up")
    before = step_of(0)["steps"]
    eventually(lambda: min(step_of(0)["steps"], step_of(1)["steps"]) > before + 20)
    assert step_of(0)["longest"] >= 0.3 * LIMIT, "the wire was not cut"

    turn("down")
    errors = [tmp_path / f"error-{rank}" for rank in (0, 1)]
    eventually(lambda: all(path.exists() for path in errors))
    turn("up")
    for rank, path in enumerate(errors):
        error = json.loads(path.read_text())
        assert error["kind"] == "PeerLost", error
        assert f"rank {1 - rank} on" in error["text"]
    codes = [launcher.finish(process).returncode for process in (leader, follower)]
    assert 0 not in codes
