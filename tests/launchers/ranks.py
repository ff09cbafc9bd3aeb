"""A program that finds its place by itself: ``python ranks.py sum``, ``fail``, ``child``, ..."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import asyncpar as ap


async def add() -> str:
    async with ap.init() as node:
        total = await node.world.all_reduce(np.full(4, float(node.rank + 1)))
        hosts = ",".join(member.host for member in node.membership.members)
        return f"rank {node.rank} of {node.size} sum {total[0]:g} hosts {hosts}"


async def save_at_the_end(node: ap.Node) -> None:
    """Train until a SIGTERM, and write a checkpoint then, which takes a while."""
    try:
        Path(sys.argv[2], f"pid-{node.rank}").write_text(str(os.getpid()))
        await asyncio.sleep(3600.0)
    finally:
        time.sleep(1.0)  # noqa: ASYNC251  # as a large file does
        Path(sys.argv[2], f"saved-{node.rank}").write_text(f"rank {node.rank} of {node.size}")


async def main(what: str) -> None:
    if what == "gone" and os.environ["SLURM_PROCID"] == "1":
        os._exit(3)
    line = "" if what in ("endless", "saving") else await add()
    if what == "twice":
        line = await add()
    elif what == "fail":
        async with ap.init() as node:
            if node.rank == 1:
                raise ValueError("the data of rank 1 is damaged")
            await node.world.all_reduce(np.ones(4))
    elif what == "again":
        attempt = os.environ["ASYNCPAR_RESTART_COUNT"]
        line += f" attempt {attempt}"
        if attempt == "0" and os.environ["RANK"] == "1":
            raise ValueError("the first attempt fails")
    elif what == "child":
        done = subprocess.run([sys.executable, __file__, "sum"], capture_output=True, text=True, check=False)  # noqa: ASYNC221  # nothing else runs
        line += " child: " + done.stderr.splitlines()[-1]
    elif what == "saving":
        async with ap.init() as node:
            await save_at_the_end(node)
    elif what == "endless":
        async with ap.init() as node:
            Path(sys.argv[2], f"pid-{node.rank}").write_text(str(os.getpid()))
            while True:
                await node.world.all_reduce(np.ones(4))
                await asyncio.sleep(0.05)
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    ap.run(main(sys.argv[1]))
