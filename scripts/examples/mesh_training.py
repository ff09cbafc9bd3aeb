"""Data and tensor parallel training as a mesh of actors: one driver calls them, and they reduce among themselves.

asyncpar launch --nproc-per-node 4 scripts/examples/mesh_training.py
"""

import numpy as np
from numpy.typing import NDArray

import asyncpar as ap

FEATURES = 8
TRUTH = np.arange(1.0, FEATURES + 1.0)
"""What the trainers are to find: the weights behind the samples."""


class Trainer(ap.Actor):
    """Fits a linear model: along "tp" each trainer holds a slice of the weights, along "dp" each has its samples."""

    def __init__(self, rate: float, batch: int) -> None:
        self.rate, self.batch = rate, batch

    async def on_start(self) -> None:
        tp = self.group("tp")
        width = FEATURES // tp.size
        self.mine = slice(tp.rank * width, (tp.rank + 1) * width)
        self.weights = np.zeros(width)

    @ap.endpoint
    async def step(self, number: int) -> float:
        dp, tp = self.group("dp"), self.group("tp")  # communicators over those that differ along one axis only
        samples = np.random.default_rng((number, dp.rank)).normal(size=(self.batch, FEATURES))
        predicted = samples[:, self.mine] @ self.weights
        await tp.all_reduce(predicted)  # a sum over the slices of the weights
        error = predicted - samples @ TRUTH
        gradient = samples[:, self.mine].T @ error / self.batch
        await dp.all_reduce(gradient, op="mean")  # a mean over everybody's samples
        self.weights -= self.rate * gradient
        return float(np.square(error).mean())

    @ap.endpoint
    async def learned(self) -> NDArray[np.float64]:
        return self.weights


async def drive(node: ap.Node) -> None:
    grid = node.nodes.reshape(dp=-1, tp=2 if node.size % 2 == 0 else 1)
    trainers = await grid.spawn(Trainer, rate=0.2, batch=32)
    for number in range(60):
        losses = await trainers.all(Trainer.step)(number)
        if number % 10 == 0:
            print(f"step {number}: loss {np.mean(list(losses.values())):.4f}")
    slices = await trainers.slice(dp=0).all(Trainer.learned)()
    weights = np.concatenate(list(slices.values()))
    print(f"{len(trainers)} trainers learned {np.round(weights, 2)}")
    await trainers.stop()


async def main() -> None:
    async with ap.init() as node:
        if node.rank == 0:
            await drive(node)
        await node.world.barrier()  # the other ranks serve until the driver is done


ap.run(main)
