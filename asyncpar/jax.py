"""Collectives inside functions that JAX compiles, and their gradients.

    import asyncpar.blocking
    import asyncpar.jax

    with asyncpar.blocking.init() as node:

        @jax.jit
        def step(weights, batch):
            loss, gradients = jax.value_and_grad(loss_of)(weights, batch)
            return asyncpar.jax.all_reduce((loss, gradients), node.world, "mean")

Functions take a communicator of ``asyncpar.blocking`` and arrays on CPUs; each is a callback of the compiled function
(``jax.experimental.io_callback``), in the order in which the program calls them, which must be the same on all ranks.
JAX runs compiled functions beside the program, so these operations have a key of their own: they match each other,
whatever the program itself calls meanwhile.  Each rank is a process.  Outside of compiled functions
``comm.all_reduce(x)`` takes JAX arrays, too.

Gradients are those of the sum of what all ranks differentiate: what comes back to a rank includes the part that its
array has in the losses of the others.  A callback that fails, because a rank is lost for example, ends the compiled
function with ``jax.errors.JaxRuntimeError``, whose text has the error.  JAX refuses ``jax.vmap`` over an operation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

try:
    import jax
    from jax.experimental import io_callback
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise ModuleNotFoundError('asyncpar.jax needs jax: pip install "asyncpar[jax]"', name="jax") from error

from asyncpar.blocking import Communicator
from asyncpar.collectives.arrays import check_leading, check_rank, check_rows, reduction_for
from asyncpar.core.config.names import ReduceOp
from asyncpar.errors import UsageError

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter"]

TreeT = TypeVar("TreeT")
Array = npt.NDArray[Any]
Settings = tuple[Any, ...]
_LINEAR = ("sum", "mean")
_KEY = "asyncpar.jax"


def all_reduce(x: TreeT, comm: Communicator, op: ReduceOp = "sum") -> TreeT:
    """Return the arrays of the tree ``x``, each combined over all ranks of ``comm``, as one operation.

    ``op`` is sum, mean, prod, min, max, band, bor or bxor; gradients flow through sum and mean.  Raises ``UsageError``
    for another kind of communicator, and where a gradient is wanted of another ``op``.
    """
    leaves, form = jax.tree.flatten(jax.tree.map(jax.numpy.asarray, x))
    _checked(comm)
    for leaf in leaves:
        reduction_for(op, leaf.dtype)
    if not leaves:
        return x
    tree: TreeT = jax.tree.unflatten(form, _all_reduce(tuple(leaves), comm, op))
    return tree


def all_gather(x: Any, comm: Communicator) -> Any:
    """Return ``x`` of all ranks of ``comm`` as one array of shape ``(size, *x.shape)``."""
    return _apply(jax.numpy.asarray(x), _checked(comm), "all_gather", ())


def reduce_scatter(x: Any, comm: Communicator, op: ReduceOp = "sum") -> Any:
    """Combine ``x`` of all ranks of ``comm`` and return this rank's slice of the result along axis 0.

    Slices have ``ceil(len(x) / size)`` rows; those of the last ranks may be shorter or empty.  Gradients flow through
    sum and mean.
    """
    x = jax.numpy.asarray(x)
    reduction_for(op, x.dtype)
    return _apply(check_rows(x), _checked(comm), "reduce_scatter", (op,))


def broadcast(x: Any, comm: Communicator, root: int = 0) -> Any:
    """Return ``x`` of ``root``; all ranks of ``comm`` pass an array of the same shape and dtype."""
    return _apply(jax.numpy.asarray(x), _checked(comm), "broadcast", (check_rank(root, comm.size),))


def all_to_all(x: Any, comm: Communicator) -> Any:
    """Send ``x[r]`` to each rank ``r`` of ``comm``; return an array like ``x``: entry ``r`` came from rank ``r``."""
    return _apply(check_leading(jax.numpy.asarray(x), _checked(comm).size), comm, "all_to_all", ())


def _checked(comm: Communicator) -> Communicator:
    if not isinstance(comm, Communicator):
        raise UsageError(
            f"comm: expected a communicator of asyncpar.blocking, got {type(comm).__module__}.{type(comm).__name__}"
        )
    return comm


def _like(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _run(comm: Communicator, work: Callable[..., Any], result: Any, *arguments: Any) -> Any:
    """Run ``work(comm, ...)`` on the host, where arguments are numpy's and read-only, when the function comes to it."""
    return io_callback(lambda *given: work(comm, *map(_on_host, given)), result, *arguments, ordered=True)


def _on_host(given: Any) -> Any:
    return tuple(map(np.asarray, given)) if isinstance(given, tuple) else np.asarray(given)


# -- trees -------------------------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _all_reduce(leaves: tuple[Any, ...], comm: Communicator, op: ReduceOp) -> tuple[Any, ...]:
    def work(comm: Communicator, given: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(map(np.asarray, comm.all_reduce_many([np.array(one) for one in given], op, key=_KEY)))

    result: tuple[Any, ...] = _run(comm, work, tuple(map(_like, leaves)), leaves)
    return result


def _reduce_forward(leaves: tuple[Any, ...], comm: Communicator, op: ReduceOp) -> tuple[tuple[Any, ...], None]:
    return _all_reduce(leaves, comm, op), None


def _reduce_backward(comm: Communicator, op: ReduceOp, _: None, gradients: tuple[Any, ...]) -> tuple[Any]:
    if op not in _LINEAR:
        raise UsageError(f"op: gradients flow through {' and '.join(_LINEAR)}, got {op!r}")
    inexact = tuple(one for one in gradients if one.dtype != jax.dtypes.float0)  # integers have none
    reduced = iter(_all_reduce(inexact, comm, op) if inexact else ())
    return (tuple(one if one.dtype == jax.dtypes.float0 else next(reduced) for one in gradients),)


_all_reduce.defvjp(_reduce_forward, _reduce_backward)


# -- single arrays -----------------------------------------------------------------------------------------------------


class _Operation(NamedTuple):
    """An operation: what runs on the host, the shape of its result, and its gradient.

    ``gradient(comm, given, x, *settings)`` returns that of the argument, which was like ``x``; ``given`` is that of the
    result.
    """

    run: Callable[..., Array]
    shape: Callable[..., tuple[int, ...]]
    gradient: Callable[..., Any]


def _rows(comm: Communicator, length: int) -> int:
    """Return how many rows of ``length`` this rank's slice has."""
    each = -(-length // comm.size)
    return max(0, min(each, length - comm.rank * each))


def _gathered(comm: Communicator, given: Any, x: Any, op: ReduceOp) -> Any:
    if op not in _LINEAR:
        raise UsageError(f"op: gradients flow through {' and '.join(_LINEAR)}, got {op!r}")
    found = _run(comm, lambda comm, mine: comm.all_gather_v(mine, key=_KEY), x, given)
    return found / comm.size if op == "mean" else found


def _reduced_at(comm: Communicator, given: Any, x: Any, root: int) -> Any:
    def work(comm: Communicator, mine: Array) -> Array:
        found = comm.reduce(mine, root=root, key=_KEY)
        return np.zeros_like(mine) if found is None else found

    return _run(comm, work, x, given)


def _again(x: Any, comm: Communicator, name: str, settings: Settings) -> Any:
    """Apply an operation as the gradient of another one."""
    return _apply(x, comm, name, settings)


_OPERATIONS = {
    "all_gather": _Operation(
        lambda comm, x: comm.all_gather(x, key=_KEY),
        lambda comm, x: (comm.size, *x.shape),
        lambda comm, given, x: _again(given, comm, "reduce_scatter", ("sum",)).reshape(x.shape),
    ),
    "reduce_scatter": _Operation(
        lambda comm, x, op: comm.reduce_scatter(x, op, key=_KEY),
        lambda comm, x, _: (_rows(comm, x.shape[0]), *x.shape[1:]),
        _gathered,
    ),
    "broadcast": _Operation(
        lambda comm, x, root: comm.broadcast(np.array(x), root=root, key=_KEY),
        lambda _, x, root: x.shape,  # noqa: ARG005
        _reduced_at,
    ),
    "all_to_all": _Operation(
        lambda comm, x: comm.all_to_all(x, key=_KEY),
        lambda _, x: x.shape,
        lambda comm, given, _: _again(given, comm, "all_to_all", ()),
    ),
}


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _apply(x: Any, comm: Communicator, name: str, settings: Settings) -> Any:
    operation = _OPERATIONS[name]
    result = jax.ShapeDtypeStruct(operation.shape(comm, x, *settings), x.dtype)
    return _run(comm, lambda comm, given: operation.run(comm, given, *settings), result, x)


def _apply_forward(x: Any, comm: Communicator, name: str, settings: Settings) -> tuple[Any, Any]:
    return _apply(x, comm, name, settings), _Shape(x.shape, x.dtype)


def _apply_backward(comm: Communicator, name: str, settings: Settings, x: _Shape, given: Any) -> tuple[Any]:
    if given.dtype == jax.dtypes.float0:
        return (np.zeros(x.shape, jax.dtypes.float0),)
    return (_OPERATIONS[name].gradient(comm, given, jax.ShapeDtypeStruct(x.shape, x.dtype), *settings),)


@jax.tree_util.register_static
class _Shape(NamedTuple):
    """The shape and dtype of an argument, between the two passes."""

    shape: tuple[int, ...]
    dtype: Any


_apply.defvjp(_apply_forward, _apply_backward)
