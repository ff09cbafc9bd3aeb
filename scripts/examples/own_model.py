"""A model of one's own in numpy, data parallel: gradients travel while others are computed.

python scripts/examples/own_model.py
asyncpar launch --nproc-per-node 4 scripts/examples/own_model.py
"""

from collections.abc import Callable, Sequence

import numpy as np

import asyncpar as ap
from asyncpar.nn import Array, Parameter
from asyncpar.parallel import DistributedDataParallel

ROWS, FEATURES, HIDDEN = 64, 8, 32


class TwoLayers:
    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.w1 = Parameter("w1", random.normal(0, 0.5, (FEATURES, HIDDEN)))
        self.w2 = Parameter("w2", random.normal(0, 0.1, (HIDDEN, 1)))

    def parameters(self) -> Sequence[Parameter]:
        return [self.w1, self.w2]

    def forward(self, x: Array) -> tuple[Array, tuple[Array, Array]]:
        hidden = np.tanh(x @ self.w1.value)
        return hidden @ self.w2.value, (x, hidden)  # the second is what backward needs

    def backward(self, saved: tuple[Array, Array], dy: Array, on_gradient: Callable[[str], None]) -> None:
        x, hidden = saved
        self.w2.grad += hidden.T @ dy
        on_gradient("w2")  # final: it travels while w1's is computed
        self.w1.grad += x.T @ (dy @ self.w2.value.T * (1 - hidden**2))
        on_gradient("w1")


async def main() -> None:
    async with ap.init() as node, DistributedDataParallel.on(node.world, TwoLayers()) as ddp:

        def descend() -> None:
            for parameter in ddp.parameters():
                parameter.value[...] -= 0.2 * parameter.grad

        samples = np.random.default_rng(node.rank)  # each rank has its own
        for step in range(200):
            x = samples.normal(size=(ROWS, FEATURES))
            y, saved = await ddp.forward(x)
            error = y - np.sin(x[:, :1] + x[:, 1:2])
            ddp.zero_grad()
            await ddp.backward(saved, error / ROWS)  # now gradients are the mean over ranks
            await ddp.update(descend)
            if node.rank == 0 and step % 50 == 49:
                print(f"step {step + 1}: loss {np.square(error).mean():.4f}")


ap.run(main)
