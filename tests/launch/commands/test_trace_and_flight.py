"""`asyncpar trace` and `asyncpar flight` look at launched jobs."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.process
LIMIT = 30.0

PROGRAM = """
    import asyncio
    import numpy as np
    import asyncpar as ap

    async def main():
        async with ap.init() as node:
            x, other = np.ones(1000, np.float32), 1 - node.rank
            for step in range(40):
                with ap.span("load", step=step):
                    await asyncio.sleep(0.001)
                await node.world.all_reduce(x)
                await asyncio.gather(node.world.send(x, other), node.world.recv(other))
            register()
            if node.rank == 1:
                await asyncio.sleep(3600)
            await node.world.barrier()

    asyncio.run(main())
"""


def until(look: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_job_that_hangs_is_traced_dumped_and_explained(launcher: Any, tmp_path: Path) -> None:
    job = launcher.start(
        "--nproc-per-node", "2", "--rdzv-id", "look", launcher.script(PROGRAM), env={"XDG_RUNTIME_DIR": ""}
    )
    until(lambda: len(launcher.registered()) == 2)
    try:
        trace = tmp_path / "t.json"
        done = launcher.look("trace", "--seconds", "0.6", "--json", "-o", str(trace), "look")
        assert done.returncode == 0, done.stderr
        events = json.loads(trace.read_bytes())["traceEvents"]
        # on a busy machine there are pauses, too ("asyncpar: processor taken")
        slices = [event for event in events if event["ph"] == "X" and not event["name"].startswith("asyncpar: ")]
        assert [event["name"] for event in slices] == ["barrier #41"], "what was over before is not in it"
        assert slices[0]["dur"] == pytest.approx(0.6e6, rel=1e-3)
        done = launcher.look("trace", "--seconds", "0", "--before", "600", "--json", "-o", str(trace), "look")
        assert done.returncode == 0, done.stderr
        events = json.loads(trace.read_bytes())["traceEvents"]
        assert sum(event["ph"] == "s" for event in events) == sum(event["ph"] == "f" for event in events) == 80
        assert {"load", "all_reduce #1"} <= {event["name"] for event in events}

        done = launcher.look("trace", "--seconds", "0", "-o", "/dev/full", "look")
        assert done.returncode == 1
        assert done.stderr == "asyncpar trace: /dev/full cannot be written: No space left on device\n"

        done = launcher.look("trace", "--seconds", "0", "-o", str(tmp_path / "t.pftrace"), "look")
        assert "of 2 ranks" in done.stdout, done
        assert (tmp_path / "t.pftrace").read_bytes()[:1] == b"\n"

        folder = tmp_path / "dump"
        done = launcher.look("flight", "dump", "--torch", "-o", str(folder), "look")
        assert done.returncode == 0, done.stderr
        assert {file.name for file in folder.iterdir()} >= {"rank_0.ring", "rank_1.ring", "torch_rank_1", "ranks.json"}
        for found in (launcher.look("flight", "explain", str(folder)), launcher.look("flight", "explain")):
            assert found.stdout.startswith("rank 1: sleeping\n"), found
            assert "rank 0 waits for rank 1 in barrier()" in found.stdout
    finally:
        job.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            job.wait(LIMIT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("trace", "nothing-runs"), "asyncpar trace: "),
        (("trace", "--seconds", "-1"), "--seconds: expected up to 600, got -1"),
        (("trace", "--before", "-1"), "--before: expected seconds, 0 or more, got -1"),
        (("flight", "dump"), "asyncpar flight dump: "),
        (("flight", "explain", "no-such-folder"), "no-such-folder: expected a folder of dumps"),
    ],
)
def test_a_wrong_call_gets_a_clear_word(launcher: Any, arguments: tuple[str, ...], message: str) -> None:
    done = launcher.look(*arguments)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
