"""Nodes that meet through a store, in one process on one loop, for tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import torch.distributed as dist

from asyncpar.node import Node, start_node
from asyncpar.torch.rendezvous.attach import attach_store

LONG = 60.0
"""Seconds that a rendezvous may take which is to end much sooner."""

SOON = 10.0


def start(
    store: Any, rank: int, size: int, *, timeout: float = LONG, environment: Mapping[str, str] | None = None
) -> asyncio.Task[Node]:
    """Let ``rank`` come, behind a prefix of its own object as torch does it."""
    attach = attach_store(
        dist.PrefixStore("default_pg", store), rank=rank, size=size, timeout=timeout, environment=environment or {}
    )
    return asyncio.create_task(start_node(attach))


async def outcomes(*tasks: asyncio.Task[Node]) -> list[Any]:
    async with asyncio.timeout(SOON):
        return await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def world(
    store: Any, size: int, environments: Sequence[Mapping[str, str]] | None = None
) -> AsyncIterator[list[Node]]:
    given = environments or [{}] * size
    tasks = [start(store, rank, size, environment=given[rank]) for rank in range(size)]
    async with asyncio.timeout(SOON):
        nodes = await asyncio.gather(*tasks)
    try:
        yield list(nodes)
    finally:
        await asyncio.gather(*(node.stop() for node in nodes))


async def total(nodes: Sequence[Node]) -> float:
    """Return the sum of the ranks plus one, computed by all of them."""
    values = [np.full(3, node.rank + 1.0, np.float32) for node in nodes]
    await asyncio.gather(*(node.world.all_reduce(value) for node, value in zip(nodes, values, strict=True)))
    assert all(np.array_equal(value, values[0]) for value in values)
    return float(values[0][0])


async def no_threads_left() -> None:
    """Return when no thread talks to a store any more."""
    async with asyncio.timeout(SOON):
        while any(thread.name == "asyncpar store" for thread in threading.enumerate()):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def seen(store: Any, *keys: str) -> None:
    """Return when ``keys`` are in ``store``."""
    there = dist.PrefixStore("default_pg", store)
    async with asyncio.timeout(SOON):
        while not there.check(list(keys)):  # noqa: ASYNC110  # a store tells nobody of news
            await asyncio.sleep(0.005)
