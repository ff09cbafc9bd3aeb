"""Functions that the conformance suite of engines runs as ranks; each returns its observations.

Those that need a world or an elastic job import it themselves: the others start in a third of the time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import time
from pathlib import Path
from typing import Any

from asyncpar.core.observe.reporting import Reporter


async def describe() -> dict[str, Any]:
    """Return this rank's place, the visible traces of its secret, and the sum of all ranks, from a collective."""
    import numpy as np

    from asyncpar.node import init

    async with init() as node:
        total = np.full(4, node.rank, np.int64)
        await node.world.all_reduce(total)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
        return {
            "pid": os.getpid(),
            "sum": int(total[0]),
            "rank": node.rank,
            "size": node.size,
            "job": os.environ["ASYNCPAR_JOB"],
            "given": os.environ.get("ENGINE_TEST", ""),
            "secret": look_for_secret(),
            **{name: int(os.environ[name]) for name in names},
        }


def echo(value: object) -> object:
    """Return ``value``."""
    return value


def add(left: int, right: int) -> int:
    """Return a sum, and the rank's number as a thousand of it."""
    return left + right + 1000 * int(os.environ["RANK"])


async def fail(culprit: int) -> None:
    """Raise on one rank; the others wait for it."""
    from asyncpar.node import init

    async with init() as node:
        if node.rank == culprit:
            raise ZeroDivisionError(f"rank {culprit} divides by zero")
        await node.world.barrier()


async def die(culprit: int) -> None:
    """Die on one rank; the others wait for it."""
    from asyncpar.node import init

    async with init() as node:
        await node.world.barrier()
        if node.rank == culprit:
            os.kill(os.getpid(), signal.SIGKILL)
        await node.world.barrier()


async def linger(folder: str) -> None:
    """Write this process's number into ``folder``, and wait for the end of the world."""
    from asyncpar.node import init

    async with init() as node:
        await node.world.barrier()
        Path(folder, str(os.getpid())).touch()
        await asyncio.sleep(3600.0)


def ignore_interrupts(folder: str) -> None:
    """Wait as ``linger`` does, without a world, until killed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    Path(folder, str(os.getpid())).touch()
    time.sleep(3600.0)


def speak() -> None:
    """Print a line on each stream, and report progress."""
    rank = int(os.environ["RANK"])
    os.write(1, f"rank {rank} says hello\n".encode())
    os.write(2, f"rank {rank} complains\n".encode())
    Reporter.from_environment(os.environ).progress(description="speaking", completed=rank + 1, total=7)


def look_for_secret() -> dict[str, Any]:
    """Return the parts of the job's secret that others could see."""
    path = Path(os.environ["ASYNCPAR_SECRET_FILE"])
    secret = path.read_bytes()
    shown = b"".join(Path(f"/proc/self/{name}").read_bytes() for name in ("cmdline", "environ"))
    return {
        "path": str(path),
        "file_mode": stat.S_IMODE(path.stat().st_mode),
        "directory_mode": stat.S_IMODE(path.parent.stat().st_mode),
        "is_shown": secret in shown or secret.hex().encode() in shown,
        "length": len(secret),
    }


def fail_once() -> int:
    """Fail in the first attempt; return the number of restarts in the second."""
    attempt = int(os.environ["ASYNCPAR_RESTART_COUNT"])
    if attempt == 0:
        raise RuntimeError("the first attempt fails")
    return attempt


async def count_elastically(folder: str) -> list[int]:
    """Count committed steps until a file ``end`` exists; return the number of steps, and the count.

    Each rank writes ``STEP SIZE`` into a file of ``folder`` named by its process.
    """
    import numpy as np

    from asyncpar.elasticity.job import elastic

    mine = Path(folder, str(os.getpid()))
    async with elastic(portions=8) as job:
        state = job.state({}, count=0, is_over=False)
        async for step in job.steps(state, until=1_000_000):
            async with step:
                for portion in step.portions:
                    step.add(portion, {"ones": np.ones(1), "ends": np.full(1, float(Path(folder, "end").exists()))})
                sums = await step.reduce()
                state["count"] += int(sums["ones"][0])
                state["is_over"] = bool(sums["ends"][0])
                if not step.is_replay:
                    _write_place(mine, step.number, step.world.size)
                    await asyncio.sleep(0.05)
            if step.is_committed and state["is_over"]:
                return [step.number + 1, state["count"]]
    raise AssertionError("the last step was not the last")


def _write_place(path: Path, number: int, size: int) -> None:
    """Write a file that appears whole or not at all."""
    draft = path.with_name(f".{path.name}")
    draft.write_text(f"{number} {size}")
    draft.replace(path)


async def raise_elastically() -> None:
    """Raise in the first step, on all ranks."""
    from asyncpar.elasticity.job import elastic

    async with elastic(portions=8) as job:
        async for step in job.steps(job.state({}, count=0), until=3):
            async with step:
                raise ZeroDivisionError("every rank divides by zero")
