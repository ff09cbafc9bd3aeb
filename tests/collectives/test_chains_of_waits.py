"""A rank that only waits itself is never blamed for one that is stopped: the end of the chain of waits is named.

Generated: operations x algorithms x the stopped rank x a survivor that comes late.  All on virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.collectives.inquiry import Answer, Culprit, Inquiry
from asyncpar.core.config.names import AllReduceAlgorithm
from asyncpar.core.observe.waits import WaitEdge, WaitNotice, describe_way, follow_waits
from asyncpar.errors import PeerCancelled, PeerError, PeerLost, PeerTimeout
from asyncpar.testing import run_virtual
from tests.collective_engines import engine_of
from tests.collectives.test_silent_ranks import CASES, SIZE, Call, Stops, calls, stoppable_ranks
from tests.soak import chosen

Program = Callable[[Communicator], Awaitable[Any]]


async def survivors(program: Program, stopped: int, *, timeout: float = 10.0) -> dict[int, BaseException | None]:
    """Run ``program`` on all ranks after one is stopped; return how it ends on each survivor."""
    stops = Stops(-1, 0)
    async with stoppable_ranks(stops, timeout=timeout) as communicators:
        await asyncio.gather(*(each.barrier(algorithm="tree") for each in communicators))
        stops.rank = stopped
        running = {each.rank: asyncio.ensure_future(program(each)) for each in communicators if each.rank != stopped}
        await asyncio.wait(running.values(), timeout=20 * timeout)
        assert all(task.done() for task in running.values()), "a survivor hangs"
        return {rank: task.exception() for rank, task in running.items()}


def check_blame(errors: dict[int, BaseException | None], stopped: int, *context: object) -> None:
    for rank, error in errors.items():
        assert isinstance(error, PeerError), (*context, rank, error)
        assert error.rank == stopped, (*context, rank, str(error))


def late(call: Call, rank: int, seconds: float) -> Program:
    """Return the program that makes ``call`` again and again, ``seconds`` late on ``rank``."""

    async def program(communicator: Communicator) -> None:
        if communicator.rank == rank:
            await asyncio.sleep(seconds)
        for _ in range(40):  # everybody comes to need the stopped rank
            await call(communicator)
            await communicator.barrier(algorithm="tree")

    return program


NEIGHBOURS = [(rank, (rank + (1, 3)[rank % 2]) % SIZE) for rank in range(SIZE)]
"""Pairs in which each rank stops once: one for each algorithm, by turns."""


@pytest.mark.parametrize(("operation", "algorithm"), CASES)
def test_a_survivor_that_comes_late_to_an_operation_is_not_blamed_for_one_that_is_stopped(
    operation: str, algorithm: str
) -> None:
    by_turns = CASES.index((operation, algorithm)) % SIZE
    for stopped, slow in chosen([NEIGHBOURS[by_turns]], soak=list(permutations(range(SIZE), 2))):
        seconds = (9.0, 9.8)[slow % 2]
        errors = run_virtual(survivors(late(calls(operation, algorithm), slow, seconds), stopped))
        check_blame(errors, stopped, stopped, slow)


def test_a_rank_that_awaits_another_call_is_not_blamed_for_one_that_it_has_made_and_does_not_await_yet() -> None:
    async def program(communicator: Communicator) -> None:
        if communicator.rank == 1:
            awaited, later = communicator.recv(2), communicator.send(np.ones(1), 0)
            try:
                await awaited
            finally:
                await later
        elif communicator.rank == 0:
            await communicator.recv(1)
        elif communicator.rank == 3:
            await communicator.recv(0)
        else:
            await communicator.recv(3)

    check_blame(run_virtual(survivors(program, 2)), 2)


@pytest.mark.parametrize("algorithm", ["ring", "tree", "halving"])
def test_a_deadline_of_a_survivor_names_the_stopped_rank_on_the_others(algorithm: AllReduceAlgorithm) -> None:
    async def program(communicator: Communicator, hasty: int) -> None:
        async with asyncio.timeout(5.0 if communicator.rank == hasty else None):
            await communicator.all_reduce(np.ones(SIZE * 4), algorithm=algorithm)

    for stopped, hasty in chosen(NEIGHBOURS, soak=list(permutations(range(SIZE), 2))):
        errors = run_virtual(survivors(lambda each, hasty=hasty: program(each, hasty), stopped))  # type: ignore[misc]
        assert isinstance(errors.pop(hasty), TimeoutError)
        check_blame(errors, stopped, stopped, hasty)
        for error in errors.values():
            assert isinstance(error, PeerCancelled)
            assert f"rank {hasty} cancelled it: TimeoutError: its deadline has passed" in str(error)
            assert f"; it waited for rank {stopped}, which has not answered for " in str(error)


@pytest.mark.parametrize("is_heard_again", [False, True])
def test_a_rank_that_handles_the_silence_of_another_and_leaves_names_it(is_heard_again: bool) -> None:
    """Rank 0 stops; rank 1 waits for it in vain and leaves; rank 2 waits for rank 1, and has asked nobody so far."""

    async def main() -> BaseException | None:
        stops = Stops(-1, 0)
        async with stoppable_ranks(stops, timeout=10.0) as communicators:
            await asyncio.gather(*(each.barrier(algorithm="tree") for each in communicators))
            stops.rank = 0
            with pytest.raises(PeerTimeout):
                await communicators[1].recv(0)
            if is_heard_again:
                stops.rank = -1
                late = asyncio.ensure_future(communicators[0].recv(1))
                await asyncio.sleep(5.0)  # it asks rank 1 why it waits
                late.cancel()
            waiting = asyncio.ensure_future(communicators[2].recv(1))
            await asyncio.sleep(0.1)
            await engine_of(communicators[1]).table.links.close()
            await asyncio.wait({waiting})
            return waiting.exception()

    error = run_virtual(main())
    assert isinstance(error, PeerLost)
    assert error.rank == (1 if is_heard_again else 0), str(error)
    assert ("has not answered for" in str(error)) != is_heard_again
    assert is_heard_again or str(error).endswith("then rank 1 left")


def test_a_warning_and_an_error_name_the_stopped_rank_and_the_way_to_it() -> None:
    notices: dict[int, WaitNotice] = {}

    async def program(communicator: Communicator) -> None:
        observer = engine_of(communicator).table.links.observer
        observer.warn_after = 5.0

        def record(operation: object, notice: WaitNotice) -> None:
            notices[communicator.rank] = notice

        observer.report_waiting = record  # type: ignore[method-assign]
        if communicator.rank == 3:
            await asyncio.sleep(4.5)
        await communicator.recv(communicator.rank - 1)

    errors = run_virtual(survivors(program, 0))
    errors.pop(3)  # the program of rank 2 has ended by then
    check_blame(errors, 0)
    assert {rank: notice.culprit for rank, notice in notices.items() if rank != 3} == dict.fromkeys((1, 2, 4), 0)
    assert "rank 3 waits for rank 2, which waits for rank 1, which waits for rank 0" in str(errors[4])
    assert isinstance(errors[4], PeerTimeout)


def test_one_that_is_slow_to_answer_is_not_blamed_before_one_that_it_called_silent_for_longer() -> None:
    inquiry = Inquiry(0.0)
    inquiry.ask([1], 1.0)
    inquiry.record_answer(1, Answer(1.0, "in that operation too", Culprit(2, 4.0)))
    inquiry.ask([1], 2.0)
    assert inquiry.find_culprit([1], me=0, now=2.5) == Culprit(2, 5.5)
    assert inquiry.find_culprit([1], me=0, now=7.0) == Culprit(1, 5.0)


def test_the_last_rank_of_the_waits_is_named_while_nobody_is_known_to_be_silent() -> None:
    def edge(rank: int, awaited: int) -> WaitEdge:
        return WaitEdge(rank, awaited, "all_reduce #2", (7, 2))

    inquiry = Inquiry(0.0)
    inquiry.ask([1], 1.0)
    inquiry.record_answer(1, Answer(1.0, "in that operation too", waits=(edge(1, 2), edge(2, 3))))
    assert inquiry.find_culprit([1], me=0, now=1.1) == Culprit(3)
    inquiry.record_answer(1, Answer(1.2, "in that operation too", waits=(edge(1, 2), edge(2, 1))))
    assert inquiry.find_culprit([1], me=0, now=1.3) is None, "ranks that wait for each other"
    inquiry.record_answer(1, Answer(1.4, "in that operation too", waits=(edge(1, 2), edge(2, 0))))
    assert inquiry.find_culprit([1], me=0, now=1.5) is None, "the chain leads back"


def test_a_long_way_is_described_by_its_ends() -> None:
    waits = {rank: WaitEdge(rank, rank + 1, "recv") for rank in range(1, 20)}
    way = follow_waits(waits, 1)
    assert [wait.rank for wait in way] == list(range(1, 20))
    assert describe_way(way[:2]) == "rank 1 waits for rank 2, which waits for rank 3"
    assert describe_way(way) == "rank 1 waits for rank 2, and so on over 17 ranks; rank 19 waits for rank 20"
