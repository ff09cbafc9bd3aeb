"""Ranks of one process meet without further setup, on one event loop or on one per thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.backends import BackendConfig, CommunicationGroup, CommunicationRuntime
from asyncpar.errors import PeerLost, PeerTimeout, UsageError
from asyncpar.parallel import init_process_group

T = TypeVar("T")
Main = Callable[[CommunicationGroup], Awaitable[T]]

CONFIG = BackendConfig(timeout=10.0)


async def be_rank(rank: int, size: int, main: Main[T]) -> T:
    runtime, group = await init_process_group("thread", rank, size, config=CONFIG)
    async with runtime:
        result = await main(group)
        await group.communicator.barrier()
        return result


def in_threads(size: int, main: Main[T]) -> list[T]:
    """Run ``main`` on ``size`` ranks, each in a thread with a loop of its own."""
    with ThreadPoolExecutor(size) as threads:
        ranks = [threads.submit(ap.run, lambda rank=rank: be_rank(rank, size, main)) for rank in range(size)]
        return [rank.result(timeout=60.0) for rank in ranks]


async def sums(group: CommunicationGroup) -> tuple[int, float, float, int]:
    small, large = np.array([group.rank + 1.0]), np.full(1 << 19, group.rank + 1.0, np.float32)
    await group.communicator.all_reduce(small)
    await group.communicator.all_reduce(large)
    assert (large == large[0]).all()
    everyone = await group.communicator.all_gather_object(threading.get_ident(), wanted=int)
    return group.size, small.item(), large[0].item(), len(set(everyone))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_threads_with_a_loop_each_meet_by_rank_and_size(size: int) -> None:
    total = size * (size + 1) / 2
    assert in_threads(size, sums) == [(size, total, total, size)] * size


async def test_tasks_of_one_loop_meet_too() -> None:
    assert await asyncio.gather(*(be_rank(rank, 3, sums) for rank in range(3))) == [(3, 6.0, 6.0, 1)] * 3


def test_all_ranks_may_connect_to_each_other_at_once() -> None:
    async def exchange(group: CommunicationGroup) -> list[float]:
        await group.communicator.barrier()
        got = await group.communicator.all_to_all(np.arange(6.0) + 10 * group.rank)
        return list(got)

    for _ in range(5):
        assert in_threads(6, exchange)[2] == [10.0 * rank + 2 for rank in range(6)]


async def test_worlds_that_form_at_the_same_time_stay_apart() -> None:
    async def second(group: CommunicationGroup) -> tuple[int, int]:
        _, inner = await init_process_group("thread", group.rank, 2, config=CONFIG)
        x = await inner.communicator.all_reduce(np.array([1]))
        return inner.size, x.item()

    assert await asyncio.gather(*(be_rank(rank, 2, second) for rank in (0, 1, 0, 1))) == [(2, 2)] * 4


def test_a_thread_that_ends_is_lost_to_the_others() -> None:
    async def leave(rank: int) -> str:
        runtime, group = await init_process_group("thread", rank, 2, config=CONFIG)
        await group.communicator.barrier()
        if rank:
            return "left"  # the loop ends with everything on it
        async with runtime:
            with pytest.raises(PeerLost, match="rank 1") as lost:
                await group.communicator.all_reduce(np.zeros(3))
            return lost.value.cause or ""

    with ThreadPoolExecutor(2) as threads:
        reported, left = threads.map(lambda rank: asyncio.run(leave(rank)), range(2))
    assert (reported, left) == ("it left the world", "left")


async def test_who_does_not_come_is_named_and_may_come_later() -> None:
    with pytest.raises(PeerTimeout, match=r"rank 1: waited 0\.01 s for ranks 0, 2 of the thread backend"):
        await init_process_group("thread", 1, 3, config=BackendConfig(timeout=0.01))
    assert await asyncio.gather(*(be_rank(rank, 3, sums) for rank in range(3))) == [(3, 6.0, 6.0, 1)] * 3


async def test_ranks_that_are_not_given_are_the_lowest_free_ones() -> None:
    async def rank_of(rank: int | None) -> int:
        async with CommunicationRuntime() as runtime:
            group = await runtime.initialize("thread", BackendConfig(rank=rank, world_size=3, timeout=10.0))
            await group.communicator.barrier()
            return group.rank

    assert list(await asyncio.gather(rank_of(0), rank_of(None), rank_of(None))) == [0, 1, 2]


async def test_settings_that_it_has_no_use_for_are_refused_and_take_no_place() -> None:
    for settings in (BackendConfig(world_size=2, rank=0, transport="tcp"), BackendConfig(world_size=2, rendezvous="a")):
        with pytest.raises(UsageError, match="the thread backend has no use for it"):
            await init_process_group("thread", config=settings)
    assert await asyncio.gather(*(be_rank(rank, 2, sums) for rank in range(2))) == [(2, 3.0, 3.0, 1)] * 2
