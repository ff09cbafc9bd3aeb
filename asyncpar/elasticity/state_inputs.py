"""Check the values from which a state is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncpar.core.not_arrays import describe_other
from asyncpar.elasticity.memory import check_room
from asyncpar.errors import UsageError
from asyncpar.nn.half import stored_value
from asyncpar.nn.optimizers import Optimizer
from asyncpar.nn.parameter import Parameter

Array: TypeAlias = NDArray[Any]
Parameters: TypeAlias = "Iterable[Parameter] | Mapping[str, Parameter | Array]"


def checked_optimizer(optimizer: object) -> Optimizer:
    """Return ``optimizer``, or raise ``UsageError`` if it is not one of asyncpar's."""
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"optimizer: expected an asyncpar.nn.optimizers.Optimizer, got {type(optimizer).__name__}; give "
            "what another one keeps by name: arrays, values, or an object with state_dict() and load_state_dict()"
        )
    return optimizer


def named_parameters(parameters: Parameters) -> dict[str, Parameter | Array]:
    """Return ``parameters`` by name.  Raises ``UsageError`` for anything else."""
    if isinstance(parameters, Mapping):
        named: dict[str, Parameter | Array] = dict(parameters)
        for name, value in named.items():
            if isinstance(value, Parameter) and value.name != name:
                raise UsageError(f"parameters: {name!r} is called {value.name!r}; give it by its own name")
            if not isinstance(value, Parameter | np.ndarray):
                raise UsageError(
                    f"parameters: {name!r}: expected a Parameter or an array, got {describe_other(value, 'value')}"
                )
    else:
        named = {}
        for parameter in parameters:
            if not isinstance(parameter, Parameter):
                raise UsageError(
                    f"parameters: expected Parameters, or a dict of arrays by name, got {type(parameter).__name__}"
                )
            if named.setdefault(parameter.name, parameter) is not parameter:
                raise UsageError(f"parameters: two are named {parameter.name!r}; names must be unique")
    return named


def check_memory(parameters: Mapping[str, Parameter | Array], optimizers: Sequence[Optimizer]) -> None:
    """Raise ``SnapshotTooLarge`` unless there is memory for the second buffers."""
    nbytes = sum(
        stored_value(value).nbytes if isinstance(value, Parameter) else value.nbytes for value in parameters.values()
    )
    moved = sum(optimizer.nbytes for optimizer in optimizers)
    check_room(nbytes + moved, "state: the second buffers, into which steps write before they are committed,")
