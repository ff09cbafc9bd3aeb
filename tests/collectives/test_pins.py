"""Pinned algorithms run, or all ranks are told why not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import pytest

from asyncpar.collectives.algorithms.catalog import known_algorithms
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.names import AllReduceAlgorithm
from asyncpar.errors import PeerCancelled, UsageError
from tests.collectives.conftest import OpenRanks, Ranks

WORLDS = [("a", "a", "a"), ("a", "a", "b"), ("a", "b", "c", "d", "e")]


async def on_all(ranks: Ranks, main: Callable[[Communicator], Awaitable[object]]) -> Sequence[object]:
    async with asyncio.timeout(30.0):
        return await asyncio.gather(*map(main, ranks.communicators), return_exceptions=True)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "pinned to the arena" in record.getMessage()]


async def add(communicator: Communicator) -> float:
    return float((await communicator.all_reduce(np.ones(1000)))[0])


@pytest.mark.parametrize("hosts", WORLDS)
@pytest.mark.parametrize("algorithm", known_algorithms("all_reduce"))
async def test_every_pin_of_a_sum_runs(open_ranks: OpenRanks, algorithm: str, hosts: tuple[str, ...]) -> None:
    async with open_ranks(len(hosts), hosts=hosts, pin=f"all_reduce@{algorithm}") as ranks:
        assert await on_all(ranks, add) == [float(len(hosts))] * len(hosts)
        used = {one.algorithm for one in ranks.communicators[0].traffic.operations}
        assert used == {algorithm}


@pytest.mark.parametrize("hosts", WORLDS)
async def test_a_pin_of_an_arena_that_is_not_there_falls_back_and_is_logged_once(
    open_ranks: OpenRanks, hosts: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    pin = "all_reduce@arena;all_gather:0-inf@arena;barrier@arena"
    with caplog.at_level(logging.WARNING):
        async with open_ranks(len(hosts), hosts=hosts, pin=pin) as ranks:
            for _ in range(3):
                assert await on_all(ranks, add) == [float(len(hosts))] * len(hosts)
                await on_all(ranks, lambda c: c.all_gather(np.ones(3)))
            half = await on_all(ranks, _add_in_part)
            assert half[:2] == [2.0, 2.0]
            table = ranks.communicators[0].algorithm_table()
    for operation in ("all_reduce", "all_gather"):
        for rank in range(len(hosts)):
            texts = [text for text in logged(caplog) if text.startswith(f"rank {rank}: {operation} is pinned")]
            assert len(texts) == 1, "once for each operation"
            assert "this rank's host has none" in texts[0]
            assert "instead" in texts[0]
    assert "*" not in table, "nothing runs as it is pinned"


async def _add_in_part(communicator: Communicator) -> float | None:
    if communicator.rank > 1:
        return None
    part = communicator.subgroup((0, 1), key="part")
    assert part is not None, "this rank is in it"
    return await add(part)


async def test_a_group_of_one_says_nothing(open_ranks: OpenRanks, caplog: pytest.LogCaptureFixture) -> None:
    async with open_ranks(1, pin="all_reduce@arena") as ranks:
        assert await on_all(ranks, add) == [1.0]
    assert logged(caplog) == []


@pytest.mark.parametrize("odd", [(1,), (0, 1, 2)])
async def test_an_algorithm_that_cannot_run_is_an_error_on_every_rank_and_the_next_call_works(
    open_ranks: OpenRanks, odd: tuple[int, ...]
) -> None:
    async with open_ranks(3, hosts=("a", "a", "b")) as ranks:
        kept = [np.full(10, float(rank)) for rank in range(3)]

        async def main(communicator: Communicator) -> None:
            wanted: AllReduceAlgorithm | None = "arena" if communicator.rank in odd else None
            await communicator.all_reduce(kept[communicator.rank], algorithm=wanted)

        for rank, error in enumerate(await on_all(ranks, main)):
            assert isinstance(error, UsageError if rank in odd else PeerCancelled)
            assert "cannot run in the arena" in str(error)
            np.testing.assert_array_equal(kept[rank], np.full(10, float(rank)))
        assert await on_all(ranks, add) == [3.0] * 3
