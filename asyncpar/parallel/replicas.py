"""Check that the replicas of a model are alike, and initialize them equally."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncpar.agreement.exchanges import compare
from asyncpar.collectives.communicator import Communicator
from asyncpar.device.arrays import device_array, is_device_array
from asyncpar.errors import UsageError
from asyncpar.gradsync import GradientSpec
from asyncpar.parallel.module import Buffer, Trainable


async def make_equal(
    parameters: Sequence[Trainable],
    settings: Sequence[str],
    communicator: Communicator,
    *,
    key: str,
    buffers: Sequence[Buffer] = (),
) -> str:
    """Give all ranks the values of rank 0, after a check that names, shapes, dtypes, order and ``settings`` are equal.

    It also checks that all parameters, and ``buffers`` if any, are on devices, or all on the host.

    Returns a word that is common to all ranks and unique to this call.  Raises ``UsageError`` on every rank, with the
    values unchanged, naming the first difference from rank 0.
    """
    lines = [*settings, *map(describe, parameters), *(f"buffer {_spec(one.name, one.value)}" for one in buffers)]
    await compare(communicator, lines, key=key)
    _check(parameters)
    await broadcast(parameters, communicator, root=0, key=f"{key}/values")
    await broadcast(buffers, communicator, root=0, key=f"{key}/buffers")
    word = await communicator.broadcast_object(secrets.token_hex(4), key=f"{key}/word", wanted=str)
    assert isinstance(word, str), "it was checked"
    return word


async def broadcast(
    parameters: Sequence[Trainable | Buffer], communicator: Communicator, *, root: int, key: str
) -> None:
    """Overwrite the values of all ranks with those of ``root``."""
    for parameter in parameters:
        await communicator.broadcast(parameter.value, root=root, key=key)


def describe(parameter: Trainable) -> str:
    """Return name, dtype and shape, and those of the gradient if they differ, for people."""
    name, value, gradient = parameter.name, parameter.value, parameter.grad
    text = str(_spec(name, value))
    return text if _is_alike(value, gradient) else f"{text} with a gradient of {_spec(name, gradient)}"


def is_on_device(parameters: Sequence[Trainable]) -> bool:
    """Return whether any of ``parameters`` is on a device."""
    return any(is_device_array(parameter.value) for parameter in parameters)


def _spec(name: str, array: Any) -> GradientSpec:
    is_there = is_device_array(array)
    found = device_array(array, name) if is_there else array
    return GradientSpec(name=name, shape=found.shape, dtype=found.dtype, is_on_device=is_there)


def _is_alike(value: Any, gradient: Any) -> bool:
    return _spec("", value) == _spec("", gradient)


def _check(parameters: Sequence[Trainable]) -> None:
    """Raise ``UsageError`` for parameters that cannot be trained; all ranks have the same ones."""
    seen: set[str] = set()
    for parameter in parameters:
        dtype = _spec(parameter.name, parameter.value).dtype
        if parameter.name in seen:
            raise UsageError(f"parameters: two are named {parameter.name!r}; names must be unique")
        if not np.issubdtype(dtype, np.floating) and not (is_on_device([parameter]) and dtype.name == "bfloat16"):
            raise UsageError(f"parameter {parameter.name}: expected a floating dtype, got {dtype}")
        if not _is_alike(parameter.value, parameter.grad):
            raise UsageError(
                f"parameter {parameter.name}: expected a gradient like the value, got {describe(parameter)}"
            )
        seen.add(parameter.name)
    if not seen:
        raise UsageError("parameters: expected at least one parameter, got none")
