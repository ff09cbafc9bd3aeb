"""A call that is refused on one rank takes its place there, and ends on the others with the reason."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from asyncpar import blocking
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import OperationMismatch, PeerCancelled, UsageError
from asyncpar.testing import local_world
from asyncpar.testing.blocking_world import blocking_world, run_ranks
from tests.collective_engines import engine_of
from tests.collectives.conftest import OpenRanks

Call = Callable[[Communicator], Coroutine[Any, Any, Any]]


@pytest.mark.parametrize("transport", ["inproc", "shm", "tcp"])
@pytest.mark.parametrize("key", [None, "bucket/1"])
async def test_later_calls_of_all_ranks_meet_again(transport: str, key: str | None) -> None:
    async def main(communicator: Communicator) -> list[Any]:
        results: list[Any] = []
        for number in range(6):
            bad = [1.0] if communicator.rank == 1 and number in (2, 4) else np.full(3, float(number))
            try:
                results.append((await communicator.all_reduce(bad, key=key))[0])  # type: ignore[type-var]
            except (UsageError, PeerCancelled) as error:
                results.append(str(error))
        return results

    async with local_world(3, transport=transport) as nodes, asyncio.timeout(30):
        for rank, results in enumerate(await asyncio.gather(*(main(node.world) for node in nodes))):
            assert [results[number] for number in (0, 1, 3, 5)] == [0.0, 3.0, 9.0, 15.0]
            reason = "x: expected a numpy array, got list; pass np.asarray(x)"
            for number in (2, 4):
                label = f"all_reduce #{number + 1}" + (f' "{key}"' if key else "")
                expected = reason if rank == 1 else f"rank {rank}: {label}: the call was refused on rank 1: {reason}"
                assert results[number] == expected


async def test_a_call_that_all_ranks_refuse_leaves_nothing_behind(open_ranks: OpenRanks) -> None:
    async with open_ranks(3) as ranks:
        for communicator in ranks.communicators:
            with pytest.raises(UsageError):
                await communicator.broadcast(np.zeros(3), root=5)
        for _ in range(20):
            await asyncio.sleep(0)
        sums = await asyncio.gather(*(c.all_reduce(np.ones(1)) for c in ranks.communicators))
        assert [float(x[0]) for x in sums] == [3.0] * 3
        assert not engine_of(ranks.communicators[0]).table.aborted


async def test_a_call_from_another_thread_is_refused_and_takes_its_place(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        zero, one = ranks.communicators
        waiting = asyncio.ensure_future(zero.barrier())
        with pytest.raises(UsageError, match="expected on the event loop of its node"):
            await asyncio.to_thread(lambda: one.barrier().close())
        with pytest.raises(PeerCancelled, match="refused on rank 1: barrier: expected on the event loop of its node"):
            await waiting
        await asyncio.gather(zero.barrier(), one.barrier())


@pytest.mark.parametrize("transport", ["inproc", "shm"])
@pytest.mark.parametrize("key", [None, "key"])
@pytest.mark.parametrize("name", ["all_reduce", "barrier", "all_gather_object"])
async def test_a_call_from_another_thread_has_its_place_before_the_next_call_even_without_a_turn_of_the_loop(
    transport: Any, name: str, key: str | None
) -> None:
    calls: dict[str, Callable[[Communicator], Coroutine[Any, Any, Any]]] = {
        "all_reduce": lambda c: c.all_reduce(np.ones(1), key=key),
        "barrier": lambda c: c.barrier(key=key),
        "all_gather_object": lambda c: c.all_gather_object(1, key=key),
    }
    call = calls[name]
    async with local_world(2, transport=transport) as nodes, asyncio.timeout(30):
        zero, one = (node.world for node in nodes)
        for _ in range(4):  # then small ones take the quick way
            await asyncio.gather(zero.all_reduce(np.ones(1)), one.all_reduce(np.ones(1)))
        for _ in range(3):
            with ThreadPoolExecutor(1) as thread:
                errors = [thread.submit(call, zero).exception() for _ in range(2)]
            assert [type(error) for error in errors] == [UsageError] * 2
            mine = zero.all_reduce(np.ones(1), key=key)
            for _ in errors:
                with pytest.raises(PeerCancelled, match="the call was refused on rank 0"):
                    await call(one)
            sums = await asyncio.gather(mine, one.all_reduce(np.ones(1), key=key))
            assert [float(x[0]) for x in sums] == [2.0, 2.0]


async def test_layers_on_top_can_refuse_a_call(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        zero, one = ranks.communicators
        one.refuse("all_reduce", UsageError("tensor: expected a dense one"), key="k")
        with pytest.raises(PeerCancelled, match="the call was refused on rank 1: tensor: expected a dense one"):
            await zero.all_reduce(np.ones(1), key="k")
        await asyncio.gather(*(c.all_reduce(np.ones(1), key="k") for c in ranks.communicators))


@pytest.mark.parametrize("content", ["array", "object"])
@pytest.mark.parametrize("is_first", [True, False])
async def test_the_receive_of_a_refused_send_ends_and_the_next_gets_the_next(
    open_ranks: OpenRanks, content: str, is_first: bool
) -> None:
    def send(communicator: Communicator, value: Any) -> Coroutine[Any, Any, None]:
        return communicator.send(value, 1) if content == "array" else communicator.send_object(value, 1)

    def receive(communicator: Communicator) -> Coroutine[Any, Any, Any]:
        return communicator.recv(0) if content == "array" else communicator.recv_object(0)

    async with open_ranks(2) as ranks:
        zero, one = ranks.communicators
        receiving = asyncio.ensure_future(receive(one)) if is_first else None
        await asyncio.sleep(0)
        with pytest.raises(UsageError):
            await send(zero, object())
        with pytest.raises(PeerCancelled, match=r"from rank 0 .*: the call was refused on rank 0: "):
            await (receiving or receive(one))
        _, got = await asyncio.gather(send(zero, np.full(2, 7.0)), receive(one))
        assert float(got[0]) == 7.0


@pytest.mark.parametrize("count", [1, 1_000_000])
@pytest.mark.parametrize("is_first", [True, False])
async def test_a_refused_receive_takes_its_message(open_ranks: OpenRanks, count: int, is_first: bool) -> None:
    async with open_ranks(2) as ranks:
        zero, one = ranks.communicators
        sending = None if is_first else asyncio.ensure_future(zero.send(np.full(count, 1.0), 1))
        await asyncio.sleep(0)
        with pytest.raises(UsageError):
            await one.recv(0, out=[0.0])  # type: ignore[arg-type]
        receiving = asyncio.ensure_future(one.recv(0))
        outcome = await asyncio.gather(sending or zero.send(np.full(count, 1.0), 1), return_exceptions=True)
        if count > 1:
            assert isinstance(outcome[0], PeerCancelled)
            assert "to rank 1 (tag 0): the call was refused on rank 1: out: expected a numpy array" in str(outcome[0])
        await zero.send(np.full(2, 2.0), 1)
        assert (await receiving).tolist() == [2.0, 2.0]


async def test_an_object_for_a_large_array_is_an_error_on_both_ranks(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        zero, one = ranks.communicators
        errors = await asyncio.gather(zero.send(np.zeros(1_000_000), 1), one.recv_object(0), return_exceptions=True)
        for error in errors:
            assert isinstance(error, OperationMismatch)
            assert "rank 0 sends float64[1000000] where rank 1 receives an object" in str(error)


def test_blocking_calls_with_a_bad_timeout_take_their_place() -> None:
    def work(comm: blocking.Communicator) -> None:
        for timeout in (5.0, -1.0 if comm.rank else 5.0, 5.0):
            try:
                result: Any = float(comm.all_reduce(np.ones(1), timeout=timeout)[0])
            except (UsageError, PeerCancelled) as error:
                result = str(error)
            results.setdefault(comm.rank, []).append(result)

    results: dict[int, list[Any]] = {}
    with blocking_world(2) as nodes:
        run_ranks(nodes, lambda node: work(node.world))
    assert results[0] == [2.0, results[0][1], 2.0]
    assert results[1] == [2.0, results[1][1], 2.0]
    assert "rank 1 failed in it: UsageError: timeout: expected a positive number" in results[0][1]
