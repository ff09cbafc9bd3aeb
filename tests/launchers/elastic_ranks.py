"""Elastic ranks that count steps: ``python elastic_ranks.py STEPS FOLDER``."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import numpy as np

import asyncpar as ap
from asyncpar.nn.optimizers import SGD, Optimizer
from asyncpar.nn.parameter import Parameter


async def main(until: int, folder: Path) -> None:
    weight = Parameter("w", np.zeros(4, np.float32))
    optimizer = Optimizer([weight], SGD())
    async with ap.elastic(portions=4) as job:
        state = job.state([weight], optimizer)
        async for step in job.steps(state, until=until):
            async with step:
                for portion in step.portions:
                    step.add(portion, {"w": np.full(4, portion + step.number, np.float32)})
                gradients = await step.reduce()
                await step.update(optimizer, gradients, learning_rate=1e-3)
            (folder / f"{os.environ['SLURMD_NODENAME']}.new").write_text(
                f"{step.world.size} {os.getpid()} {step.number}"
            )
            (folder / f"{os.environ['SLURMD_NODENAME']}.new").rename(folder / f"{os.environ['SLURMD_NODENAME']}.step")
            await asyncio.sleep(0.02)
    sys.stdout.write(f"ended with {weight.value[0]:.6g}\n")


if __name__ == "__main__":
    ap.run(main(int(sys.argv[1]), Path(sys.argv[2])))
