"""`asyncpar status` and `asyncpar stacks` look at launched jobs, also where ranks are stopped or block their loops."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.stopped import stop_process

pytestmark = pytest.mark.process
Launcher = Any  # the class lives in conftest.py

PROGRAM = """
    import asyncio
    import numpy as np
    import asyncpar as ap

    async def main():
        async with ap.init() as node:
            x = np.ones(1000, np.float32)
            for step in range(1_000_000):
                await node.world.all_reduce(x)
                x[:] = 1.0
                if step == 20:
                    print("step", step, "of rank", rank, flush=True)
                    register()
                await asyncio.sleep(0.005)

    asyncio.run(main())
"""
LIMIT = 30.0


def start(launcher: Any, ranks: int) -> subprocess.Popen[str]:
    """Start a job that prints into the file ``printed``."""
    with (launcher.directory / "printed").open("wb") as output:
        process: subprocess.Popen[str] = launcher.start(
            *("--nproc-per-node", str(ranks), "--rdzv-id", "look", "--grace-period", "1"),
            launcher.script(PROGRAM),
            env={"XDG_RUNTIME_DIR": ""},
            output=output.fileno(),
        )
    deadline = time.monotonic() + LIMIT
    while len(launcher.registered()) < ranks:
        assert time.monotonic() < deadline, (launcher.directory / "printed").read_text()
        time.sleep(0.05)
    return process


def until(look: Any) -> Any:
    deadline = time.monotonic() + LIMIT
    while (found := look()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def look_for_pids(launcher: Any) -> dict[int, int] | None:
    """Return the processes of all three ranks, once the launcher has heard of them."""
    done = launcher.look("status", "look", "--json")
    hosts = json.loads(done.stdout).get("hosts", ()) if done.returncode == 0 else ()
    found = {rank["rank"]: rank["pid"] for host in hosts for rank in host["ranks"]}
    return found if len(found) == 3 else None


def test_a_stopped_rank_is_found_with_operation_and_place(launcher: Any) -> None:
    process = start(launcher, 3)
    pids: dict[int, int] = until(lambda: look_for_pids(launcher))
    assert sorted(pids) == [0, 1, 2]
    stop_process(pids[2])
    try:

        def look() -> str | None:
            text = launcher.look("status", "look").stdout
            return text if re.search(r"ranks 0, 1 wait for rank 2 \(.*\), which is stopped", text) else None

        text = until(look)
        assert "all_reduce #" in text
        assert "job.py:" in text
        stacks = launcher.look("stacks", "--json")
        answer = json.loads(stacks.stdout)
        assert sorted(answer["ranks"]) == ["0", "1", "2"]
        assert answer["silent"] == {}
        assert answer["ranks"]["2"]["text"].startswith("it is stopped (SIGSTOP, or a debugger); ")
        assert any("which needs rank 2 at job.py:" in chain for chain in answer["chains"])
        logs = launcher.look("logs", "-r", "1,2", "--json")
        assert json.loads(logs.stdout) == {"1": ["step 20 of rank 1"], "2": ["step 20 of rank 2"]}
        assert "has no rank 9" in launcher.look("logs", "-r", "9").stderr
        process.send_signal(signal.SIGQUIT)
        printed = launcher.directory / "printed"
        for words in (
            "got SIGQUIT; the stacks of the ranks:",
            "it is stopped (SIGSTOP, or a debugger); it does not answer",
            "await node.world.all_reduce(x)",
        ):
            until(lambda words=words: words in printed.read_text() or None)
        process.send_signal(signal.SIGINT)
        launcher.finish(process)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pids[2], signal.SIGCONT)
    assert not list(Path(launcher.temporary).glob("asyncpar-*/jobs/*"))


HOLD = """
    import asyncio, ctypes
    import asyncpar as ap

    async def main():
        async with ap.init() as node:
            await node.world.barrier()
            register()
            while rank == 1:
                ctypes.PyDLL(None).sleep(60)  # with the interpreter lock
            await node.world.barrier()

    ap.run(main)
"""


@pytest.mark.soak
def test_a_rank_that_is_in_c_with_the_interpreter_lock_reports_its_stack(launcher: Any) -> None:
    process = launcher.start(
        "--nproc-per-node", "2", "--rdzv-id", "look", launcher.script(HOLD), env={"XDG_RUNTIME_DIR": ""}
    )
    deadline = time.monotonic() + LIMIT
    while len(launcher.registered()) < 2:
        assert time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    text = until(lambda: text if "rank 1 (pid " in (text := launcher.look("stacks", "look").stdout) else None)
    assert "it does not answer; this was read from its memory" in text
    assert re.search(r"job\.py:\d+ in main", text.partition("read from its memory")[2])
    for _ in range(2):  # the rank does not end by the first one
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    launcher.finish(process)


def test_no_job_and_wrong_arguments_are_reported_in_a_line(launcher: Any) -> None:
    for arguments, code, words in (
        (("stacks",), 1, "no job of yours runs on this host"),
        (("status", "absent"), 1, "none of yours here is called 'absent'"),
        (("stacks", "-r", "x"), 2, "expected ranks as 0,2 or 4-7, got 'x'"),
    ):
        done = launcher.look(*arguments)
        assert (done.returncode, len(done.stderr.splitlines())) == (code, 1), done.stderr
        assert words in done.stderr
