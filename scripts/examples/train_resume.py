"""A model of one's own in numpy, DiLoCo with int8, and checkpoints: kill it, and go on with another number of ranks.

Not in ``DistributedDataParallel``: ranks that exchange gradients in every step have no differences for DiLoCo's rounds.

asyncpar launch --nproc-per-node 4 scripts/examples/train_resume.py saved     # Ctrl-C, kill -9, what you like
asyncpar launch --nproc-per-node 2 scripts/examples/train_resume.py saved     # goes on from the last round
"""

import os
import sys

import numpy as np

import asyncpar as ap
from asyncpar.gradsync import GradientCompressionConfig, GradientSynchronizer
from asyncpar.nn import Parameter
from asyncpar.parallel.local import DiLoCo

FEATURES, EVERY, STEPS = 16, 10, int(os.environ.get("STEPS", "200"))


def gradient(w: Parameter, x: np.ndarray) -> float:
    """Set the gradient of the mean squared error of a linear model, and return the error."""
    error = x @ w.value - x @ np.linspace(-1, 1, FEATURES)[:, None]
    w.grad[...] = x.T @ error / len(x)
    return float(np.square(error).mean())


async def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("train_resume: expected a folder for checkpoints: train_resume.py FOLDER")
    async with ap.init() as node:
        if node.size < 2:
            sys.exit(
                "train_resume: expected at least 2 ranks: asyncpar launch --nproc-per-node 2 train_resume.py FOLDER"
            )
        w = Parameter("w", np.zeros((FEATURES, 1), np.float32))
        compression = GradientCompressionConfig(codec="int8")
        synchronizer = GradientSynchronizer.data_parallel(node.world, compression=compression, name="outer")
        outer = DiLoCo([w], synchronizer, every=EVERY)
        first = 0
        if os.path.isdir(sys.argv[1]) and ap.checkpoint.latest(sys.argv[1]) is not None:
            loaded = await ap.checkpoint.load(sys.argv[1], communicator=node.world)
            w.value[...] = loaded.values["w"]
            outer.restore(loaded.values["outer"])
            first = loaded.step
        for step in range(first, STEPS):
            samples = np.random.default_rng([step, node.rank])  # each rank has its own
            loss = gradient(w, samples.normal(size=(32, FEATURES)).astype(np.float32))
            w.value -= 0.02 * w.grad
            await outer.step()  # every tenth: ranks meet, in a quarter of the bytes
            if (step + 1) % EVERY == 0:
                values = {"w": w.value, "outer": outer.state()}
                await ap.checkpoint.save(sys.argv[1], values, step=step + 1, communicator=node.world, keep=2)
                if node.rank == 0:
                    print(f"step {step + 1} on {node.size} ranks, from {first}: loss {loss:.4f}", flush=True)


ap.run(main)
