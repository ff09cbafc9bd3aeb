"""Train a JAX model on several ranks: the step is compiled whole, with the mean of gradients of all ranks inside it.

asyncpar launch --nproc-per-node 2 scripts/examples/jax_data_parallel.py

At the end rank 0 trains alone on the batches of all ranks, and compares.
"""

import sys
from collections.abc import Callable
from typing import Any

import asyncpar.blocking

try:
    import asyncpar.jax
except ModuleNotFoundError as error:
    sys.exit(f"jax_data_parallel: {error}")
import jax
import jax.numpy as jnp

WIDTH, SAMPLES, STEPS, RATE = 32, 24, 30, 0.1


def loss_of(weights: Any, batch: Any) -> Any:
    x, y = batch
    return jnp.mean((jnp.tanh(x @ weights[0]) @ weights[1] - y) ** 2)


def batch_of(ranks: range, step: int) -> Any:
    keys = [jax.random.key(1000 * step + rank) for rank in ranks]
    x = jnp.concatenate([jax.random.normal(key, (SAMPLES, WIDTH)) for key in keys])
    return x, jnp.sin(x).sum(axis=1, keepdims=True) / WIDTH


def train(ranks: range, mean: Callable[[Any], Any]) -> list[float]:
    def train_step(weights: Any, batch: Any) -> Any:
        loss, gradients = mean(jax.value_and_grad(loss_of)(weights, batch))
        return loss, jax.tree.map(lambda weight, gradient: weight - RATE * gradient, weights, gradients)

    compiled = jax.jit(train_step)
    keys = jax.random.split(jax.random.key(0))
    weights = [jax.random.normal(key, (WIDTH, n)) * WIDTH**-0.5 for key, n in zip(keys, (WIDTH, 1), strict=True)]
    losses = []
    for step in range(STEPS):
        loss, weights = compiled(weights, batch_of(ranks, step))
        losses.append(float(loss))
    return losses


with asyncpar.blocking.init() as node:
    comm = node.world
    together = train(range(comm.rank, comm.rank + 1), lambda tree: asyncpar.jax.all_reduce(tree, comm, "mean"))
    if comm.rank == 0:
        alone = train(range(comm.size), lambda tree: tree)
        most = max(abs(one - other) for one, other in zip(together, alone, strict=True))
        print(f"{comm.size} rank(s), loss {together[0]:.4f} to {together[-1]:.4f}, {most:.1e} from one process at most")
