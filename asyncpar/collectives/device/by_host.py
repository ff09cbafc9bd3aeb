"""Operations on devices of several hosts without an NCCL route: by NCCL on each host, by our lanes between them.

The first rank of each host is its leader.  An all-reduce is reduced to the leaders on their devices, combined between
the leaders over the lanes of the world, from and to pinned memory, and broadcast on each host: one array per host is
sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from asyncpar.collectives import reductions, rooted
from asyncpar.collectives.algorithms.catalog import NCCL
from asyncpar.collectives.arrays import Array
from asyncpar.collectives.device.arguments import shown
from asyncpar.collectives.device.channel import Enqueue
from asyncpar.collectives.device.dtypes import NcclReduction, nccl_reduction
from asyncpar.collectives.device.records import LaunchOrder
from asyncpar.collectives.device.run import DeviceWork, start
from asyncpar.collectives.device.staging import copies_for
from asyncpar.collectives.device.state import DeviceGroup
from asyncpar.collectives.engine import Engine
from asyncpar.collectives.operation import Operation
from asyncpar.collectives.subgroups import subgroup
from asyncpar.device.arrays import DeviceArray
from asyncpar.device.fabric import LEGACY_DEFAULT_STREAM, NcclDtype


class DeviceHostGroups:
    """The group of this host's ranks, and the group of the leaders, which is None on other ranks."""

    def __init__(self, engine: Engine) -> None:
        ids = DeviceGroup.of(engine).host.host_ids
        hosts: dict[str, list[int]] = {}
        for place, rank in enumerate(engine.ranks):
            hosts.setdefault(ids[rank], []).append(place)
        self.members = list(hosts.values())
        self.own = next(number for number, ranks in enumerate(self.members) if engine.rank in ranks)
        on_host = subgroup(engine, self.members[self.own], None, "devices of one host", has_own_timeout=False)
        assert on_host is not None
        self.on_host: Engine = on_host
        leaders = [ranks[0] for ranks in self.members]
        self.leaders = subgroup(engine, leaders, None, "leaders of hosts", has_own_timeout=False)

    @classmethod
    def of(cls, engine: Engine) -> DeviceHostGroups:
        """Return the groups of ``engine``, made on first use."""
        group = DeviceGroup.of(engine)
        if group.by_host is None:
            group.by_host = cls(engine)
        assert isinstance(group.by_host, cls)
        return group.by_host

    def close(self) -> None:
        """Free both groups."""
        self.on_host.close()
        if self.leaders is not None:
            self.leaders.close()


async def all_reduce(
    engine: Engine, operation: Operation, source: DeviceArray, target: DeviceArray, op: str, how: NcclReduction
) -> None:
    """Reduce ``source`` of all ranks into ``target``."""
    groups = DeviceHostGroups.of(engine)
    key = f"{operation.name} by host, {operation.sequence}"
    part = nccl_reduction("sum", source.dtype) if op == "mean" else how

    def reduce(comm: Any, stream: int) -> Any:
        return comm.reduce(source.pointer, target.pointer, source.size * how.factor, how.dtype, part.op, 0, stream)

    async def combine(x: Array) -> Array:
        assert groups.leaders is not None
        inner = "sum" if op == "mean" else op
        found: Array = await reductions.all_reduce(groups.leaders, x, op=inner, out=None, algorithm=None, key=key)
        if op == "mean":
            np.divide(found, engine.size, out=found, casting="unsafe")
        return found

    await _on_host(groups, "reduce", (source, target), reduce, f"{key}: reduce")
    if groups.leaders is not None:
        await _between_hosts(engine, operation, target, combine)
    await _spread(groups, target, 0, f"{key}: broadcast")


async def broadcast(engine: Engine, operation: Operation, x: DeviceArray, root: int) -> None:
    """Copy ``x`` of ``root`` to all ranks."""
    groups = DeviceHostGroups.of(engine)
    key = f"{operation.name} by host, {operation.sequence}"
    home = next(number for number, ranks in enumerate(groups.members) if root in ranks)

    async def hand_over(x: Array) -> Array:
        assert groups.leaders is not None
        found: Array = await rooted.broadcast(groups.leaders, x, root=home, algorithm=None, key=key)
        return found

    if groups.own == home:
        await _spread(groups, x, groups.members[home].index(root), f"{key}: at home")
    if groups.leaders is not None:
        await _between_hosts(engine, operation, x, hand_over, writes=groups.own != home)
    if groups.own != home:
        await _spread(groups, x, 0, f"{key}: elsewhere")


async def _on_host(
    groups: DeviceHostGroups, name: str, arrays: tuple[DeviceArray, ...], enqueue: Enqueue, key: str
) -> None:
    """Run one NCCL call on the devices of this host."""
    work = DeviceWork(
        name=name,
        arguments=tuple(shown(array) for array in arrays),
        arrays=arrays,
        result=lambda _: None,
        enqueue=lambda _: enqueue,
        through_host=_impossible,
    )
    await start(groups.on_host, work, algorithm=NCCL, key=key, stream=None)


async def _spread(groups: DeviceHostGroups, x: DeviceArray, root: int, key: str) -> None:
    def spread(comm: Any, stream: int) -> Any:
        return comm.broadcast(x.pointer, x.pointer, x.nbytes, NcclDtype.UINT8, root, stream)

    await _on_host(groups, "broadcast", (x,), spread, key)


async def _between_hosts(
    engine: Engine,
    operation: Operation,
    x: DeviceArray,
    move: Callable[[Array], Any],
    *,
    writes: bool = True,
) -> None:
    copies = copies_for(DeviceGroup.of(engine).host, operation, x.device)
    try:
        [copied] = await copies.to_host((x,), x.stream or LEGACY_DEFAULT_STREAM)
        found = await move(copied)
        if writes:
            await copies.to_device([found], [x])
    finally:
        await copies.close()


async def _impossible(operation: Operation, order: LaunchOrder) -> None:  # noqa: ARG001
    raise AssertionError(f"{operation.label}: all ranks of its host have NCCL")
