"""Operations of ``asyncpar.jax`` on two ranks, and their gradients, in one line of JSON for each rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import asyncpar.blocking
import asyncpar.jax as apj
from asyncpar.errors import UsageError

LENGTH = 5


def plain(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float64).tolist(), tree)


def message(call: Callable[[], Any], kind: type[Exception]) -> str:
    try:
        jax.block_until_ready(call())
    except kind as error:
        return str(error)
    return "no error"


def checks(comm: asyncpar.blocking.Communicator) -> dict[str, Any]:
    """Return results by name; a loss is the sum of the squares of an operation's result."""
    x = jnp.arange(1.0, LENGTH + 1) * (comm.rank + 1)
    square = jnp.arange(1.0, 7.0).reshape(2, 3) * (comm.rank + 1)

    def compiled(operation: Callable[[Any], Any], x: Any) -> Any:
        found = jax.jit(operation)(x)
        gradient = jax.jit(jax.grad(lambda x: (operation(x) ** 2).sum()))(x)
        return plain((found, gradient))

    tree = {"a": x, "b": (jnp.float32(comm.rank), jnp.arange(3) + comm.rank)}

    def of_tree(tree: Any) -> Any:
        reduced = apj.all_reduce(tree, comm, "mean" if not isinstance(tree["b"][1], jax.Array) else "sum")
        return (reduced["a"] ** 2).sum() + reduced["b"][0]

    @jax.jit
    def scanned(x: Any) -> Any:
        return jax.lax.scan(lambda carry, _: (apj.all_reduce(carry, comm) * 0.5, carry.sum()), x, None, length=3)

    @jax.jit
    def ordered(x: Any) -> Any:
        first, second = apj.all_reduce(x, comm), apj.all_reduce(2 * x, comm, "max")
        return second, first

    def beside() -> list[float]:
        """Call operations of the program while the compiled function may not have come to its own."""
        totals = []
        for number in range(20):
            later = jax.jit(lambda x: apj.all_reduce(jnp.sin(x) * 0 + 1, comm).sum())(jnp.ones(200_000) * number)
            if comm.rank:
                later.block_until_ready()
            totals.append(float(comm.all_reduce(np.ones(1))[0]) + float(later))
        return totals

    return {
        "beside": beside(),
        "all_reduce sum": compiled(lambda x: apj.all_reduce(x, comm), x),
        "all_reduce mean": compiled(lambda x: apj.all_reduce(x, comm, "mean"), x),
        "all_reduce bfloat16": plain(jax.jit(lambda x: apj.all_reduce(x, comm))(x.astype("bfloat16"))),
        "all_gather": compiled(lambda x: apj.all_gather(x, comm), x),
        "reduce_scatter sum": compiled(lambda x: apj.reduce_scatter(x, comm), x),
        "reduce_scatter mean": compiled(lambda x: apj.reduce_scatter(x, comm, "mean"), x),
        "broadcast": compiled(lambda x: apj.broadcast(x, comm, 1), x),
        "all_to_all": compiled(lambda x: apj.all_to_all(x, comm), square),
        "tree": plain(jax.jit(lambda tree: apj.all_reduce(tree, comm))(tree)),
        "gradient of a tree": plain(jax.jit(jax.grad(of_tree, allow_int=False))({**tree, "b": (tree["b"][0], 1.0)})),
        "empty tree": apj.all_reduce((), comm) == (),
        "scan": plain(scanned(x)),
        "order": plain(ordered(x)),
        "not compiled": plain(apj.all_reduce(x, comm)),
        "large": plain(jax.jit(lambda x: apj.all_reduce(x, comm).sum())(jnp.ones(3_000_000))),
        "max has no gradient": message(lambda: jax.grad(lambda x: apj.all_reduce(x, comm, "max").sum())(x), UsageError),
        "another communicator": message(lambda: apj.all_reduce(x, None), UsageError),  # type: ignore[arg-type]
        "another rule": message(lambda: apj.all_reduce(x, comm, "summ"), UsageError),  # type: ignore[arg-type]
        "another shape": message(lambda: apj.all_to_all(x, comm), UsageError),
        "another root": message(lambda: apj.broadcast(x, comm, 2), UsageError),
        "traced": message(lambda: jax.jit(comm.all_reduce)(x), UsageError),
        "vmap": message(lambda: jax.vmap(lambda x: apj.all_reduce(x, comm))(x), ValueError),
        "refused": message(
            lambda: jax.jit(lambda x: apj.all_reduce(x, comm))(jnp.ones(3 + comm.rank)), jax.errors.JaxRuntimeError
        ),
        "afterwards": plain(apj.all_reduce(x, comm)),
    }


if __name__ == "__main__":
    with asyncpar.blocking.init() as node:
        results = node.world.all_gather_object(checks(node.world))
        if node.rank == 0:
            print(json.dumps(results), flush=True)
