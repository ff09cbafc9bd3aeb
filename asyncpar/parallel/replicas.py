"""Check that the replicas of a model are alike, and give them equal values."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np

from asyncpar.agreement.exchanges import compare
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import UsageError
from asyncpar.gradsync import GradientSpec
from asyncpar.parallel.module import Trainable


async def make_equal(
    parameters: Sequence[Trainable], settings: Sequence[str], communicator: Communicator, *, key: str
) -> str:
    """Give all ranks the values of rank 0, after a check that names, shapes, dtypes, order and ``settings`` are equal.

    Returns a word that all ranks have in common, and no other call returns.  Raises ``UsageError`` on every rank, with
    the values as they were, which names the first difference from rank 0.
    """
    lines = [*settings, *map(describe, parameters)]
    await compare(communicator, lines, key=key)
    _check(parameters)
    await broadcast(parameters, communicator, root=0, key=f"{key}/values")
    word = await communicator.broadcast_object(secrets.token_hex(4), key=f"{key}/word", wanted=str)
    assert isinstance(word, str), "it was checked"
    return word


async def broadcast(parameters: Sequence[Trainable], communicator: Communicator, *, root: int, key: str) -> None:
    """Overwrite the values of all ranks with those of ``root``."""
    for parameter in parameters:
        await communicator.broadcast(parameter.value, root=root, key=key)


def describe(parameter: Trainable) -> str:
    """Return name, dtype and shape, and those of the gradient where they differ, for people."""
    name, value, gradient = parameter.name, parameter.value, parameter.grad
    text = str(GradientSpec(name=name, shape=value.shape, dtype=value.dtype))
    if (gradient.shape, gradient.dtype) == (value.shape, value.dtype):
        return text
    return f"{text} with a gradient of {GradientSpec(name=name, shape=gradient.shape, dtype=gradient.dtype)}"


def _check(parameters: Sequence[Trainable]) -> None:
    """Raise ``UsageError`` for parameters that cannot be trained; all ranks have the same ones."""
    seen: set[str] = set()
    for parameter in parameters:
        value, gradient = parameter.value, parameter.grad
        if parameter.name in seen:
            raise UsageError(f"parameters: two are named {parameter.name!r}; names must be unique")
        if not np.issubdtype(value.dtype, np.floating):
            raise UsageError(f"parameter {parameter.name}: expected a floating dtype, got {value.dtype}")
        if (gradient.shape, gradient.dtype) != (value.shape, value.dtype):
            raise UsageError(
                f"parameter {parameter.name}: expected a gradient like the value, got {describe(parameter)}"
            )
        seen.add(parameter.name)
    if not seen:
        raise UsageError("parameters: expected at least one parameter, got none")
