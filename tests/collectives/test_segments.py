"""``algorithm`` may say how many bytes of a chunk go in one message."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.collectives.plan import parse_segment, split_segment
from asyncpar.core.config.names import AllReduceAlgorithm, Name
from asyncpar.errors import OperationMismatch, UsageError
from tests.collectives.conftest import OpenRanks, Ranks

COUNT = 50_001


async def on_all(ranks: Ranks, main: Callable[[Communicator], Awaitable[object]]) -> Sequence[object]:
    async def one(communicator: Communicator) -> object:
        return await main(communicator)

    async with asyncio.timeout(30.0):
        return await asyncio.gather(*map(one, ranks.communicators), return_exceptions=True)


@pytest.mark.parametrize("algorithm", ["ring", "halving", "doubling", "tree", "hierarchical", "hierarchical-tree"])
@pytest.mark.parametrize("segment", ["4k", "64k", "2m"])
async def test_every_algorithm_sums_in_messages_of_any_size(
    open_ranks: OpenRanks, algorithm: str, segment: str
) -> None:
    async with open_ranks(3, hosts=("a", "a", "b")) as ranks:

        async def main(communicator: Communicator) -> np.ndarray:
            x = np.arange(COUNT, dtype=np.float64) * (communicator.rank + 1)
            return await communicator.all_reduce(x, algorithm=Name(f"{algorithm}/{segment}"))

        for result in await on_all(ranks, main):
            np.testing.assert_array_equal(result, np.arange(COUNT) * 6.0)


async def test_short_messages_are_more_messages(open_ranks: OpenRanks) -> None:
    async with open_ranks(2, hosts=("a", "b")) as ranks:
        for algorithm in ("ring", "ring/16k"):
            await on_all(ranks, lambda c, algorithm=algorithm: c.all_reduce(np.ones(COUNT), algorithm=algorithm))  # type: ignore[misc]
        traffic = ranks.communicators[0].traffic
        long, short = traffic.of("all_reduce", "ring"), traffic.of("all_reduce", "ring/16k")
        assert short.messages > 5 * long.messages
        assert short.payload_bytes == pytest.approx(long.payload_bytes, rel=1e-3)


async def test_ranks_that_cut_differently_are_notified(open_ranks: OpenRanks) -> None:
    async with open_ranks(2, hosts=("a", "b")) as ranks:
        errors = await on_all(
            ranks, lambda c: c.all_reduce(np.ones(COUNT), algorithm=Name(("ring", "ring/16k")[c.rank]))
        )
        assert all(isinstance(error, OperationMismatch) and "ring/16k" in str(error) for error in errors), errors
        results = await on_all(ranks, lambda c: c.all_reduce(np.ones(3)))
        assert all(float(result[0]) == 2.0 for result in results)  # type: ignore[index]


@pytest.mark.parametrize("algorithm", ["ring/3m", "ring/1k", "ring/", "ring/64", "ring/-4k", "ring/64k/2", "star/64k"])
async def test_sizes_that_cannot_be_are_refused_on_every_rank(
    open_ranks: OpenRanks, algorithm: AllReduceAlgorithm
) -> None:
    async with open_ranks(2) as ranks:
        errors = await on_all(ranks, lambda c: c.all_reduce(np.ones(3), algorithm=algorithm))
        assert all(isinstance(error, UsageError) for error in errors), errors
        await on_all(ranks, lambda c: c.barrier())


@pytest.mark.parametrize("call", ["reduce_scatter", "all_gather", "broadcast", "reduce"])
async def test_other_operations_have_no_sizes_of_messages(open_ranks: OpenRanks, call: str) -> None:
    async with open_ranks(2) as ranks:
        errors = await on_all(ranks, lambda c: getattr(c, call)(np.ones(4), algorithm="ring/64k"))
        assert all(isinstance(error, UsageError) and "'ring/64k'" in str(error) for error in errors), errors


def test_sizes_are_read_exactly() -> None:
    assert [parse_segment(text) for text in ("4k", "256k", "1m", "2m")] == [4096, 262144, 1048576, 2097152]
    assert [split_segment(name) for name in ("ring", "ring/64k")] == [("ring", None), ("ring", 65536)]
