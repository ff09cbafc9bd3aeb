"""Hangs that are planted in a world of four ranks: one program for each, whose culprit and cause are known."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import numpy as np

import asyncpar as ap
from asyncpar.node import Node
from asyncpar.observe.explain import HangCause

Program = Callable[[Node], Awaitable[object]]

WORLD = 4
CULPRIT = 2


class Planted(NamedTuple):
    """A program that does not end, and what holds it up."""

    program: Program
    cause: HangCause
    culprits: tuple[int, ...] = (CULPRIT,)


async def warm(node: Node) -> None:
    for _ in range(3):
        await node.world.all_reduce(np.zeros(4, np.float32))


async def absent(node: Node) -> None:
    await warm(node)
    if node.rank == CULPRIT:
        await asyncio.Event().wait()
    await node.world.all_reduce(np.zeros(4, np.float32))


async def other_operation(node: Node) -> None:
    await warm(node)
    if node.rank == CULPRIT:
        await node.world.broadcast(np.zeros(4, np.float32))
    else:
        await node.world.all_reduce(np.zeros(4, np.float32))


async def shape(node: Node) -> None:
    await warm(node)
    await node.world.all_reduce(np.zeros(5 if node.rank == CULPRIT else 4, np.float32))


async def dtype(node: Node) -> None:
    await warm(node)
    await node.world.all_reduce(np.zeros(4, np.float64 if node.rank == CULPRIT else np.float32))


async def root(node: Node) -> None:
    await warm(node)
    await node.world.broadcast(np.zeros(4, np.float32), root=1 if node.rank == CULPRIT else 0)


async def order(node: Node) -> None:
    await warm(node)
    calls = [
        lambda: node.world.all_reduce(np.zeros(4, np.float32)),
        lambda: node.world.all_gather(np.zeros(4, np.float32)),
    ]
    await asyncio.gather(*(call() for call in (reversed(calls) if node.rank == CULPRIT else calls)))


async def sleeping(node: Node) -> None:
    await warm(node)
    if node.rank == CULPRIT:
        await asyncio.sleep(3600)
    await node.world.barrier()


class Asker(ap.Actor):
    """Asks ``other``, which asks this one: both are busy."""

    def __init__(self, other: ap.ActorRef[Any]) -> None:
        self._other = other

    @ap.endpoint
    async def ask(self) -> None:
        await asyncio.sleep(0.1)
        await self._other.ask()


async def cycle(node: Node) -> None:
    await warm(node)
    if node.rank in (1, CULPRIT):
        await node.spawn(Asker, node.ref("asker", 3 - node.rank), name="asker")
    await node.world.barrier()
    if node.rank in (1, CULPRIT):
        await node.ref("asker").ask()
    await node.world.barrier()


async def order_of_groups(node: Node) -> None:
    await warm(node)
    rows = await node.world.split(0, key=node.rank)
    columns = await node.world.split(0, key=node.rank)
    assert rows is not None
    assert columns is not None
    first, second = (columns, rows) if node.rank == CULPRIT else (rows, columns)
    await first.barrier()
    await second.barrier()


async def half_of_a_link(node: Node) -> None:
    await warm(node)
    if node.rank == 1:
        await node.world.send(np.zeros(1), CULPRIT)
        lane: Any = node.links.link(CULPRIT).lane
        lane._peer._arrive = lambda *_: None  # noqa: SLF001  # frames from rank 1 to rank 2 are lost from now on
        await node.world.send(np.zeros(1 << 20), CULPRIT)
    elif node.rank == CULPRIT:
        await node.world.recv(1)
        await node.world.recv(1)
    await node.world.barrier()


PLANTED = {
    "absent": Planted(absent, HangCause.ABSENT),
    "other operation": Planted(other_operation, HangCause.OTHER_OPERATION),
    "shape": Planted(shape, HangCause.SHAPE),
    "dtype": Planted(dtype, HangCause.DTYPE),
    "root": Planted(root, HangCause.ROOT),
    "order": Planted(order, HangCause.ORDER),
    "order of groups": Planted(order_of_groups, HangCause.ORDER),
    "sleeping": Planted(sleeping, HangCause.SLEEPING),
    "cycle of calls": Planted(cycle, HangCause.CYCLE, (1, 2)),
    "half of a link": Planted(half_of_a_link, HangCause.LINK, (1, 2)),
}
