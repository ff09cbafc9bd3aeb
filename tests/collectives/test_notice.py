"""A notice is received by all other ranks, before or after they listen, and by none that listens no longer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np

from asyncpar.collectives.communicator import notice_of, skip_use
from asyncpar.node import Node
from asyncpar.testing.loop import run_virtual
from asyncpar.testing.world import local_world
from tests.parallel.replicas import on_all


def on_three(on_rank: Callable[[Node], Awaitable[object]]) -> list[object]:
    async def main() -> list[object]:
        async with local_world(3) as nodes:
            return await on_all(nodes, on_rank)

    return run_virtual(main())


def test_all_other_ranks_receive_it_once_and_the_next_use_is_silent() -> None:
    async def on_rank(node: Node) -> tuple[bool, int, bool]:
        received = 0

        def count() -> None:
            nonlocal received
            received += 1

        notice = notice_of(node.world, "changes")
        notice.on_given = count
        await node.world.barrier()
        if node.rank == 1:
            notice.give()
            notice.give()
        await asyncio.sleep(1.0)
        notice.close()
        after = notice_of(node.world, "changes")
        await asyncio.sleep(1.0)
        after.close()
        return notice.is_given, received, after.is_given

    assert on_three(on_rank) == [(True, 1, False), (False, 0, False), (True, 1, False)]


def test_a_rank_that_listens_later_has_received_it() -> None:
    async def on_rank(node: Node) -> bool:
        if node.rank == 1:
            notice_of(node.world, "changes").give()
            return True
        await asyncio.sleep(1.0)
        notice = notice_of(node.world, "changes")
        notice.close()
        return notice.is_given

    assert on_three(on_rank) == [True, True, True]


def test_a_notice_that_comes_when_nobody_listens_is_forgotten() -> None:
    async def on_rank(node: Node) -> int:
        notice = notice_of(node.world, "changes")
        await node.world.barrier()
        if node.rank == 1:
            await asyncio.sleep(1.0)
            notice.give()
        else:
            notice.close()
            notice.close()
        await asyncio.sleep(2.0)
        notice.close()
        (value,) = await node.world.all_reduce(np.ones(1), key="changes")
        return int(value)

    assert on_three(on_rank) == [3, 3, 3]


def test_a_use_that_is_skipped_counts() -> None:
    async def on_rank(node: Node) -> int:
        for _ in range(2):
            skip_use(node.world, "sum")
        if node.rank == 1:
            skip_use(node.world, "other")
        (value,) = await node.world.all_reduce(np.full(1, node.rank), key="sum")
        return int(value)

    assert on_three(on_rank) == [3, 3, 3]


def test_a_use_that_another_rank_has_given_up_can_be_skipped() -> None:
    async def on_rank(node: Node) -> int:
        if node.rank == 1:
            call = node.world.all_reduce(np.ones(1), key="sum")
            call.close()
        else:
            await asyncio.sleep(1.0)
            skip_use(node.world, "sum")
        (value,) = await node.world.all_reduce(np.ones(1), key="sum")
        return int(value)

    assert on_three(on_rank) == [3, 3, 3]
