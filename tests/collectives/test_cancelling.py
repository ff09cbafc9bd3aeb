"""Cancelling an operation takes effect at once, is told to the others, and leaves the group usable."""

from __future__ import annotations

import asyncio
import gc
import traceback
import warnings
from typing import Any

import numpy as np
import pytest

from asyncpar.collectives.arrays import Array
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.names import AllReduceAlgorithm
from asyncpar.errors import PeerCancelled
from asyncpar.testing import run_virtual
from tests.collectives.conftest import OpenRanks, Ranks


async def settle() -> None:
    """Let everything that is ready run."""
    for _ in range(20):
        await asyncio.sleep(0)


async def sums(ranks: Ranks, value: float = 1.0) -> list[float]:
    arrays = await asyncio.gather(*(c.all_reduce(np.full(3, value)) for c in ranks.communicators))
    return [float(array[0]) for array in arrays]


@pytest.mark.parametrize("count", [1, 5_000_000])
async def test_the_others_learn_who_cancelled_what(open_ranks: OpenRanks, count: int) -> None:
    async with open_ranks(3) as ranks:
        tasks = [asyncio.ensure_future(c.all_reduce(np.ones(count))) for c in ranks.communicators[:2]]
        await settle()
        tasks[0].cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(outcomes[0], asyncio.CancelledError)
        assert isinstance(outcomes[1], PeerCancelled)
        assert outcomes[1].rank == 0
        assert outcomes[1].operation == "all_reduce #1"
        assert str(outcomes[1]) == "rank 1: all_reduce #1: rank 0 cancelled it: CancelledError"


async def test_a_rank_that_calls_a_cancelled_operation_later_fails_at_once(open_ranks: OpenRanks) -> None:
    async with open_ranks(3) as ranks:
        first = asyncio.ensure_future(ranks.communicators[0].barrier())
        await settle()
        first.cancel()
        await asyncio.wait({first})
        await settle()
        for late in ranks.communicators[1:]:
            with pytest.raises(PeerCancelled, match="rank 0 cancelled it: CancelledError"):
                await late.barrier()
        assert await sums(ranks) == [3.0] * 3


async def test_memory_is_not_touched_after_a_cancel(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        zero, one = ranks.communicators
        array = np.zeros(1_000_000)
        receiving = asyncio.ensure_future(zero.broadcast(array, root=1))
        await settle()
        receiving.cancel()
        await asyncio.wait({receiving})
        array[:] = 7.0
        with pytest.raises(PeerCancelled):
            await one.broadcast(np.ones(1_000_000), root=1)
        await settle()
        assert float(array.min()) == float(array.max()) == 7.0


async def test_late_frames_of_a_cancelled_operation_are_dropped(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        zero, one = ranks.communicators
        for _ in range(300):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await zero.all_reduce(np.ones(4096))
            with pytest.raises(PeerCancelled):
                await one.all_reduce(np.ones(4096))
        assert await sums(ranks) == [2.0] * 2


async def test_one_of_several_operations_can_be_cancelled(open_ranks: OpenRanks) -> None:
    async with open_ranks(3) as ranks:

        async def run(communicator: Communicator) -> list[Any]:
            calls = [asyncio.ensure_future(communicator.all_reduce(np.full(2, float(i)))) for i in range(4)]
            if communicator.rank == 1:
                calls[2].cancel()
            outcomes: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
            return outcomes

        results = await asyncio.gather(*(run(c) for c in ranks.communicators))
        for rank, outcome in enumerate(results):
            assert [float(outcome[i][0]) for i in (0, 1, 3)] == [0.0, 3.0, 9.0]
            assert isinstance(outcome[2], asyncio.CancelledError if rank == 1 else PeerCancelled)


async def test_an_exception_inside_an_operation_ends_it_everywhere(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        wrong: Array = np.zeros((5, 2))  # fits nothing: the lengths are known only when the operation runs
        outcomes = await asyncio.gather(
            ranks.communicators[0].all_gather_v(np.zeros((1, 2)), out=wrong),
            ranks.communicators[1].all_gather_v(np.full((200_000, 2), 1.0)),
            return_exceptions=True,
        )
        assert isinstance(outcomes[0], ValueError)
        assert isinstance(outcomes[1], PeerCancelled)
        assert "rank 0 failed in it: UsageError: out: expected float64[200001, 2]" in str(outcomes[1])
        assert await sums(ranks) == [2.0] * 2


async def test_a_call_that_is_never_awaited_warns_and_fails_on_the_others(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        waiting = asyncio.ensure_future(ranks.communicators[0].barrier())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ranks.communicators[1].barrier()  # type: ignore[unused-coroutine]
            gc.collect()
        messages = [str(warning.message) for warning in caught]
        caught.clear()  # it holds the coroutine
        assert messages == ["coroutine 'Communicator.barrier' was never awaited"]
        with pytest.raises(PeerCancelled, match="it was called there, but never awaited"):
            await waiting
        assert await sums(ranks) == [2.0] * 2


@pytest.mark.parametrize(("algorithm", "missing"), [("ring", 2), ("tree", 1), ("doubling", 1)])
def test_the_traceback_of_a_timeout_says_who_was_missing(
    open_ranks: OpenRanks, algorithm: AllReduceAlgorithm, missing: int
) -> None:
    async def main() -> str:
        async with open_ranks(3) as ranks:
            try:
                async with asyncio.timeout(30):
                    await ranks.communicators[0].all_reduce(np.zeros(1), algorithm=algorithm)
            except TimeoutError as error:
                return "".join(traceback.format_exception(error))
        return ""

    text = run_virtual(main())
    assert f"rank 0: all_reduce #1 waited 30.0 s for rank {missing} (last heard" in text
    assert "TimeoutError" in text


def test_a_cancelled_receive_leaves_the_message_to_the_next_one(open_ranks: OpenRanks) -> None:
    async def main() -> float:
        async with open_ranks(2) as ranks:
            zero, one = ranks.communicators
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(30):
                    await one.recv(0)
            await zero.send(np.array([4.0]), 1)
            return float((await one.recv())[0])

    assert run_virtual(main()) == 4.0


async def test_cancelling_a_send_fails_the_receive_of_it(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        zero, one = ranks.communicators
        sending = asyncio.ensure_future(zero.send(np.zeros(1_000_000), 1))
        await settle()
        sending.cancel()
        await asyncio.wait({sending})
        with pytest.raises(PeerCancelled):
            await one.recv(0)
        both = await asyncio.gather(zero.send(np.ones(2), 1), one.recv(0))
        np.testing.assert_array_equal(both[1], 1.0)


async def test_a_send_that_is_cancelled_does_not_hold_up_the_next_one(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        zero, one = ranks.communicators
        receives = [asyncio.ensure_future(one.recv(0)) for _ in range(2)]
        await settle()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            zero.send(np.zeros(2), 1).close()
        await zero.send(np.ones(2), 1)
        outcomes = await asyncio.gather(*receives, return_exceptions=True)
        assert isinstance(outcomes[0], PeerCancelled)
        np.testing.assert_array_equal(outcomes[1], 1.0)
