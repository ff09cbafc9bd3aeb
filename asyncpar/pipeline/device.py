"""Stages that compute on CUDA devices: their activations and gradients are sent from device to device.

The communicator moves them, after the work in the streams of their stages; their shape and dtype are sent ahead in a
small message, so that a stage can allocate memory on its device.  Nothing here copies to the host or waits for a
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from asyncpar.collectives.communicator import Communicator
from asyncpar.device.arrays import DeviceArray, device_array, is_device_array
from asyncpar.errors import ProtocolError, UsageError
from asyncpar.nn.stage import Stage
from asyncpar.pipeline.recompute import Recomputed

Sendable: TypeAlias = NDArray[Any] | DeviceArray


@runtime_checkable
class DeviceStage(Protocol):
    """The additional members of a ``Stage`` that takes and returns device arrays."""

    @property
    def stream(self) -> int:
        """The handle of its CUDA stream, common to all stages of a rank; 1: the legacy default one."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Return a new uninitialized array for an activation or its gradient, allocated for ``stream``.

        ``dtype`` is numpy's name, or ``bfloat16``.  Called in the loop's thread.
        """
        ...


def device_stage(stage: Stage[Any]) -> DeviceStage | None:
    """Return ``stage``, or the stage that it recomputes, if that is on a device."""
    while isinstance(stage, Recomputed):
        stage = stage.stage
    return stage if isinstance(stage, DeviceStage) else None


def are_on_devices(stages: Sequence[Stage[Any]]) -> bool:
    """Return whether all ``stages`` are on devices.  Raises ``UsageError`` if only some are, or streams differ."""
    there = [device_stage(stage) for stage in stages]
    found = [stage is not None for stage in there]
    if any(found) and not all(found):
        raise UsageError(
            f"stages: expected all stages of a rank on devices, or none, but of {len(found)} only chunks "
            f"{', '.join(str(chunk) for chunk, is_there in enumerate(found) if is_there)} have a stream and empty"
        )
    streams = sorted({stage.stream for stage in there if stage is not None})
    if len(streams) > 1:  # they pass arrays to each other on the rank, too
        raise UsageError(f"stages: expected all stages of a rank in one stream, got streams {streams}")
    return any(found)


def check_sendable(array: object, what: str, stage: Stage[Any]) -> Sendable:
    """Return the result of ``stage`` in its form for sending.  Raises ``UsageError`` naming ``what`` otherwise."""
    of_device = device_stage(stage)
    if of_device is not None:
        return replace(device_array(array, what), stream=of_device.stream)
    if is_device_array(array):
        raise UsageError(
            f"{what}: expected an array of the host, got one on a device; its stage needs a stream and empty, see "
            "pipeline.device.DeviceStage"
        )
    if not isinstance(array, np.ndarray):
        raise UsageError(f"{what}: expected an array, got {type(array).__name__}")
    return array


def given_to_stage(array: Any) -> Any:
    """Return an array in the form that stages take."""
    return array.owner if isinstance(array, DeviceArray) else array


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayHeader:
    """The message that precedes an array: its shape, and the name of its dtype."""

    shape: list[int]
    dtype: str

    def check(self) -> None:
        """Raise ``ProtocolError`` for a header that no array can have."""
        try:
            dtype = np.dtype(ml_dtypes.bfloat16) if self.dtype == "bfloat16" else np.dtype(self.dtype)
        except TypeError as error:
            raise ProtocolError(f"header of an array: {error}") from error
        if dtype.hasobject or min(self.shape, default=0) < 0:
            raise ProtocolError(f"header of an array: expected numbers, got {self.dtype}{self.shape}")


class DeviceMessages:
    """Device arrays between ranks: ``headers`` and ``group`` have the same ranks."""

    def __init__(self, group: Communicator, headers: Communicator) -> None:
        self._group, self._headers = group, headers

    async def send(self, array: DeviceArray, dest: int, *, tag: int) -> None:
        """Send ``array``, after the work in its stream; see ``Communicator.send``."""
        header = ArrayHeader(shape=list(array.shape), dtype=array.dtype.name)
        await self._headers.send_object(header, dest, tag=tag)
        content: Any = array
        await self._group.send(content, dest, tag=tag)

    async def recv(self, source: int, stage: Stage[Any], *, tag: int) -> DeviceArray:
        """Return the next array of ``source`` with ``tag``, in memory of ``stage``, where all streams may use it."""
        header = await self._headers.recv_object(source, tag=tag, wanted=ArrayHeader)
        header.check()
        place = device_stage(stage)
        assert place is not None, "the opening has looked for it"
        made = device_array(place.empty(tuple(header.shape), header.dtype), f"{type(place).__name__}.empty")
        out: Any = replace(made, stream=place.stream)
        await self._group.recv(source, out=out, tag=tag)
        return replace(made, stream=None)
