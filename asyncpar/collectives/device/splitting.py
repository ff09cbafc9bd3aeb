"""NCCL communicators for the groups of a split, split from that of the parent group."""

from __future__ import annotations

from collections.abc import Sequence

from asyncpar.collectives.device.channel import Origin
from asyncpar.collectives.device.records import LaunchOrder
from asyncpar.collectives.device.run import DeviceWork, start
from asyncpar.collectives.device.state import DeviceGroup
from asyncpar.collectives.engine import Engine
from asyncpar.collectives.operation import Operation
from asyncpar.device.fabric import DeviceCommunicator, NcclResult

NOT_CONNECTED = -1


def connected_epoch(engine: Engine) -> int:
    """Return the epoch of the communicator that the group of ``engine`` can split, or ``NOT_CONNECTED``."""
    group = engine.devices
    channel = group.connected if isinstance(group, DeviceGroup) else None
    return NOT_CONNECTED if channel is None else channel.epoch


async def split_communicator(
    engine: Engine, operation: Operation, groups: Sequence[Sequence[int]]
) -> DeviceGroup | None:
    """Split the communicator of ``engine`` by ``ncclCommSplit`` into ``groups`` of its ranks, which all ranks call.

    Returns the devices of this rank's group, None for a rank in no group.  It is an operation on devices like others:
    it has its place in the order of launches, waits until nothing runs on the communicator, ends within the deadline,
    and names a missing rank.
    """
    parent = DeviceGroup.of(engine)
    channel = parent.connected
    color = next((number for number, ranks in enumerate(groups) if engine.rank in ranks), None)
    made: list[DeviceCommunicator] = []

    def split(comm: DeviceCommunicator, _: int) -> NcclResult:
        child = comm.split(color, 0 if color is None else groups[color].index(engine.rank))
        if child is not None:
            made.append(child)
        return NcclResult.IN_PROGRESS

    async def nothing(_operation: Operation, _order: LaunchOrder) -> None:
        """Split into nothing: a rank has no NCCL any more, which the new groups find out for themselves."""

    work = DeviceWork(
        name="split of communicators",
        arguments=(),
        arrays=(),
        result=lambda _: None,
        enqueue=lambda _: split,
        through_host=nothing,
        is_alone=True,
        device=0 if channel is None else channel.device,
    )
    try:
        await start(engine, work, algorithm=None, key=f"split of communicators, {operation.sequence}", stream=None)
    except BaseException:
        for child in made:
            parent.host.in_thread(child.abort)
        raise
    if not made or color is None or channel is None:
        return None
    members = groups[color]
    places = tuple(channel.places[rank] for rank in members)
    origin = Origin(channel, places, made=made[0])
    ranks = [engine.ranks[rank] for rank in members]
    group = DeviceGroup(parent.host, ranks, members.index(engine.rank), origin)
    parent.host.keep(group)
    return group
