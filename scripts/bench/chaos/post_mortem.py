"""Kill ranks, launchers and agents of small jobs, and check that each leaves a post-mortem that says what happened.

    scripts/bench/run post_mortem --kills 200 --seed 1
    scripts/bench/run post_mortem --kills 50 --agents     # `asyncpar agent` runs the jobs, and is killed

Each job has two ranks.  One of them, or the launcher, is killed (SIGKILL) at a random moment after it has begun to
work; with ``--agents`` it is the agent that runs them.  A folder is complete when the summary is there, names the
command, and the rings of both ranks can be read.  The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from asyncpar.errors import ProtocolError
from asyncpar.net.membership.credentials import create_secret
from asyncpar.observe.image import read_image

RANKS = 2
PATIENCE = 60.0

PROGRAM = """
import numpy as np
import asyncpar as ap

async def main():
    async with ap.init() as node:
        x = np.ones(1024, np.float32)
        await node.world.all_reduce(x, "max")
        open(f"there-{node.rank}", "w").close()
        print("at work", flush=True)
        while True:
            await node.world.all_reduce(x, "max")

ap.run(main)
"""


def run_once(folder: Path, dice: random.Random) -> str:
    """Start a job, kill one of its processes, and return what is wrong with the post-mortem; "" for nothing."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    remains = folder / "remains"
    command = [sys.executable, "-m", "asyncpar", "launch", f"--nproc-per-node={RANKS}", f"--post-mortem={remains}"]
    with subprocess.Popen(
        [*command, str(program)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder
    ) as launcher:
        assert launcher.stdout is not None
        for _ in range(RANKS):
            launcher.stdout.readline()
        time.sleep(dice.uniform(0.0, 0.05))
        ranks = list(find_ranks(launcher.pid))
        victim = dice.choice([launcher.pid, *ranks])
        os.kill(victim, signal.SIGKILL)
        launcher.wait(PATIENCE)
    if victim == launcher.pid:
        return check(remains, "the launcher", "The launcher on ")
    return check(remains, "a rank", "was killed by SIGKILL")


def run_once_by_agent(folder: Path, dice: random.Random) -> str:
    """Do as ``run_once``, with an agent that runs the job, and is killed."""
    program, secret, remains = folder / "program.py", folder / "secret", folder / "remains"
    program.write_text(PROGRAM)
    create_secret(secret)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    common = [f"--secret-file={secret}"]
    agent = start(folder, "agent", "--name=one", f"--listen={address}", f"--post-mortem={remains}", *common)
    launch = ["launch", f"--rdzv-endpoint={address}", "--nnodes=1:1", f"--nproc-per-node={RANKS}", *common]
    launcher = None
    try:
        if not is_so(lambda: answers(port)):
            return "the agent does not listen"
        launcher = start(folder, *launch, str(program))
        if not is_so(lambda: len(list(folder.glob("there-*"))) == RANKS):
            return "the job did not begin"
        time.sleep(dice.uniform(0.0, 0.05))
        agent.kill()
        return check(remains, "the agent", "The agent on one (pid ")
    finally:
        for process in (agent, launcher):
            if process is not None:
                process.kill()
                process.wait(PATIENCE)


def is_so(look: Callable[[], bool]) -> bool:
    """Wait until it is so; False if it does not become so."""
    limit = time.monotonic() + PATIENCE
    while not look():
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True


def answers(port: int) -> bool:
    """Does anybody listen there?"""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start ``asyncpar`` with ``arguments``; what it says is in the file ``said``."""
    with (folder / "said").open("ab") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "asyncpar", *arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[3])},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )


def check(remains: Path, victim: str, expected: str) -> str:
    """Return what is wrong with what a ``victim`` has left; "" for nothing."""
    summary = wait_for_summary(remains)
    if summary is None:
        return f"no summary after the end of {victim}"
    text = summary.read_text()
    if expected not in text or "program.py" not in text:
        return f"the summary does not say {expected!r}"
    return check_rings(summary.parent)


def check_rings(folder: Path) -> str:
    """Return what is wrong with the rings in ``folder``."""
    rings = sorted((folder / "rings").glob("*.ring"))
    if len(rings) != RANKS:
        return f"{len(rings)} rings"
    for ring in rings:
        try:
            image = read_image(ring.read_bytes())
        except ProtocolError as error:
            return str(error)
        if not image.operations:
            return f"{ring.name}: no operations"
    return ""


def find_ranks(launcher: int) -> Iterator[int]:
    """Yield the processes of the launcher's ranks."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        if any(word.endswith(b"program.py") for word in words):
            yield int(child)


def wait_for_summary(remains: Path) -> Path | None:
    """Return the summary when it is there; None if it does not come."""
    return next(remains.glob("*/summary.txt")) if is_so(lambda: any(remains.glob("*/summary.txt"))) else None


def main() -> None:
    """Kill, check, and count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--agents", action="store_true", help="agents run the jobs, and are killed")
    options = parser.parse_args()
    dice = random.Random(options.seed)
    problems = []
    for number in range(options.kills):
        with tempfile.TemporaryDirectory(prefix="asyncpar-bench-") as folder:
            problem = (run_once_by_agent if options.agents else run_once)(Path(folder), dice)
        if problem:
            problems.append(problem)
            print(f"kill {number}: {problem}", file=sys.stderr)
    print(json.dumps({"kills": options.kills, "complete": options.kills - len(problems), "problems": problems[:10]}))
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
