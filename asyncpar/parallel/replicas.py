"""Making the replicas of a model equal."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

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
    await _compare(lines, communicator, key=key)
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


async def _compare(lines: Sequence[str], communicator: Communicator, *, key: str) -> None:
    """Raise ``UsageError`` unless all ranks pass equal lines; sends them only where their hashes differ."""
    digest = np.frombuffer(hashlib.sha256("\n".join(lines).encode()).digest()[:8], np.uint8)
    digests = await communicator.all_gather(digest, key=f"{key}/digest")
    if (digests == digests[0]).all():
        return
    first, *others = await communicator.all_gather_object(list(lines), key=f"{key}/lines", wanted=list[str])
    for rank, other in enumerate(others, start=1):
        for expected, got in zip_longest(first, other, fillvalue="nothing more"):
            if expected != got:
                raise UsageError(
                    "parameters: expected the same names, shapes, dtypes, order and settings on all ranks, but where "
                    f"rank 0 has {expected}, rank {rank} has {got}"
                )


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
