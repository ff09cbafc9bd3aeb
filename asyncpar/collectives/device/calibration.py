"""Measurement of device transfers: by NCCL inside the host of rank 0 and between hosts, and copies to the host."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Final

import numpy as np

from asyncpar.collectives import gathers, rooted
from asyncpar.collectives.algorithms.catalog import NCCL
from asyncpar.collectives.device.by_host import DeviceHostGroups
from asyncpar.collectives.device.host import DeviceHost
from asyncpar.collectives.device.operations import all_reduce
from asyncpar.collectives.device.staging import copies_for
from asyncpar.collectives.device.state import DeviceGroup
from asyncpar.collectives.device_cost import measured_lane
from asyncpar.collectives.engine import Engine
from asyncpar.core.config.device_lanes import PCI_EXPRESS_COSTS, DeviceLanes
from asyncpar.core.config.transport import LaneCosts
from asyncpar.device.arrays import device_array
from asyncpar.device.fabric import LEGACY_DEFAULT_STREAM, DeviceError
from asyncpar.errors import UsageError

_SMALL_BYTES: Final = 8
_LARGE_BYTES = 1 << 26
_SMALL_TRIPS: Final = 10
_LARGE_TRIPS: Final = 3

Clock = Callable[[], float]


class _Buffer:
    """Memory of ``device`` as an array of float32."""

    def __init__(self, address: int, nbytes: int, device: int) -> None:
        self.address, self.nbytes, self.device = address, nbytes, device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = (self.address, False)
        return {"shape": (self.nbytes // 4,), "typestr": "<f4", "data": data, "strides": None, "version": 3}

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device

    def first(self, nbytes: int) -> _Buffer:
        return _Buffer(self.address, nbytes, self.device)


async def calibrate_devices(engine: Engine, before: Coroutine[Any, Any, None], device: int, *, clock: Clock) -> None:
    """Await the calibration ``before`` this one, and measure device lanes; all ranks get rank 0's figures.

    Raises ``UsageError`` on all ranks if one of them has no NCCL, or no free memory on its device.
    """
    host = DeviceGroup.of(engine).host
    why, address = host.reason or "it has none", None
    if host.fabric is not None:
        try:
            address = host.fabric.allocate(_LARGE_BYTES, device)
        except DeviceError as error:
            why = str(error)
    try:
        await before
        able = await gathers.all_gather(
            engine, np.array([address is not None], np.uint8), out=None, algorithm=None, key=None
        )
        for rank, is_able in zip(engine.ranks, able.reshape(-1), strict=True):
            if not is_able:
                more = f": {why}" if address is None else ", whose error has the reason"
                raise UsageError(f"device: rank {rank} has no NCCL to measure, or no room{more}; leave device out")
        assert host.fabric is not None
        assert address is not None
        lanes = await _measured(engine, host, _Buffer(address, _LARGE_BYTES, device), clock)
        engine.policy = replace(engine.policy, device_lanes=await _figures_of_first(engine, lanes))
    finally:
        if address is not None and host.fabric is not None:
            host.fabric.free(address, device)


async def _measured(engine: Engine, host: DeviceHost, buffer: _Buffer, clock: Clock) -> DeviceLanes:
    """Return the lanes as measured by this rank; those that do not exist keep their figures."""
    known = engine.policy.device_lanes
    is_spread = DeviceGroup.of(engine).is_spread
    near = DeviceHostGroups.of(engine).on_host if is_spread else engine
    within, between = known.within, known.between
    small, large = await _all_reduces(near, buffer, clock)
    if near.size > 1:
        moved = 2 * (near.size - 1) / near.size * buffer.nbytes
        depth = 1 + 2 * (near.size - 1).bit_length()
        within = measured_lane(small, large, moved, steps=depth, reduction=within.reduction)
    if is_spread:
        try:
            small, large = await _all_reduces(engine, buffer, clock)
        except UsageError:  # on all ranks: NCCL has no route
            pass
        else:
            moved = 2 * (engine.size - 1) / engine.size * buffer.nbytes
            depth = 2 * (len(engine.hosts) - 1).bit_length()
            between = measured_lane(small, large, moved, steps=depth, reduction=between.reduction)
    return DeviceLanes(within=within, between=between, copy=await _copies(host, buffer, clock))


async def _all_reduces(engine: Engine, buffer: _Buffer, clock: Clock) -> tuple[float, float]:
    """Return the seconds of a small and of a large all-reduce by NCCL, after one untimed run of each."""
    found = []
    for nbytes, trips in ((_SMALL_BYTES, _SMALL_TRIPS), (buffer.nbytes, _LARGE_TRIPS)):
        begun = 0.0
        for trip in range(trips + 1):
            begun = clock() if trip == 1 else begun
            await all_reduce(engine, buffer.first(nbytes), op="max", out=None, algorithm=NCCL, key=None, stream=None)
        found.append((clock() - begun) / trips)
    return found[0], found[1]


async def _copies(host: DeviceHost, buffer: _Buffer, clock: Clock) -> LaneCosts:
    """Return the costs of copies to the host, including the allocation of pinned memory for each, as in operations."""
    found = []
    for nbytes, trips in ((_SMALL_BYTES, _SMALL_TRIPS), (buffer.nbytes, _LARGE_TRIPS)):
        begun = 0.0
        for trip in range(trips + 1):
            begun = clock() if trip == 1 else begun
            copies = copies_for(host, None, buffer.device)
            try:
                await copies.to_host((device_array(buffer.first(nbytes)),), LEGACY_DEFAULT_STREAM)
            finally:
                await copies.close()
        found.append((clock() - begun) / trips)
    return measured_lane(found[0], found[1], buffer.nbytes, steps=1, reduction=PCI_EXPRESS_COSTS.reduction)


async def _figures_of_first(engine: Engine, lanes: DeviceLanes) -> DeviceLanes:
    """Return the figures of rank 0."""
    kinds = (lanes.within, lanes.between, lanes.copy)
    figures = np.array([(one.latency, one.bandwidth, one.reduction, one.is_measured) for one in kinds])
    received = await rooted.broadcast(engine, figures, root=0, algorithm=None, key=None)
    within, between, copy = (
        LaneCosts(latency=float(row[0]), bandwidth=float(row[1]), reduction=float(row[2]), is_measured=bool(row[3]))
        for row in received
    )
    return DeviceLanes(within=within, between=between, copy=copy)
