"""Making the parameters of all ranks equal before training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asyncpar.errors import UsageError
from asyncpar.multinode.groups import NodeGroups, agree
from asyncpar.nn import Parameter
from asyncpar.nn.half import stored_value
from asyncpar.nn.optimizers import distinct


async def register(parameters: Iterable[Parameter], groups: NodeGroups, *, key: str) -> tuple[Parameter, ...]:
    """Return the parameters, each once, with the values of rank 0 of the world on all ranks.

    Raises ``UsageError``, on every rank, where names, shapes, dtypes or their order differ, and for parameters that
    cannot be trained here.
    """
    given = tuple(parameters)
    problem = _problem(given)
    chosen = () if problem is not None else distinct(given)
    lines = tuple(_describe(parameter) for parameter in chosen)
    await agree(groups.world, (*lines, *([] if problem is None else [f"an error: {problem}"])), key=key)
    if problem is not None:
        raise UsageError(problem)
    await _broadcast(chosen, groups, key=f"{key}/values")
    return chosen


async def _broadcast(parameters: Sequence[Parameter], groups: NodeGroups, *, key: str) -> None:
    """Hand the values of rank 0 to the first ranks of all nodes, and on from there."""
    for parameter in parameters:
        if groups.leaders is not None:
            await groups.leaders.broadcast(stored_value(parameter), key=key)
        await groups.node.broadcast(stored_value(parameter), key=key)


def _problem(parameters: Sequence[Parameter]) -> str | None:
    try:
        chosen = distinct(parameters)
    except UsageError as error:
        return str(error)
    for parameter in chosen:
        if not parameter.slice.is_whole:
            return (
                f"parameter {parameter.name}: expected a whole tensor, got a slice of {parameter.slice.global_shape}; "
                "sums over slices mean nothing: train tensor-parallel models with ThreeDParallelismCoordinator"
            )
        if parameter.is_released:
            return f"parameter {parameter.name}: expected a value, got one that is released"
        if not stored_value(parameter).flags.writeable:
            return f"parameter {parameter.name}: expected a value that can be written to, got one that is read-only"
    return None


def _describe(parameter: Parameter) -> str:
    return f"{parameter.name} {stored_value(parameter).dtype}{list(parameter.shape)}"
